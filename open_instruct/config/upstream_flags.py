"""Flags of other trainers in this lineage (open-instruct's `dpo_tune_cache.py`, `finetune.py` and their kin) that
mean nothing here: why, and what to write instead. Each sentence continues `--name …`. A command that lacks a flag
which the sentence names does not say it.
"""

from __future__ import annotations

_HUB = "has no use here: nothing is ever uploaded; the finished model is in OUT/hf_model, ready for `hf upload`"
_BEAKER = "has no use here: no evaluation jobs are launched; run your evaluation on OUT/hf_model"
_LORA = "is not offered: every weight is trained; --fsdp_shard_degree spreads them over more GPUs"
_DEEPSPEED = "belongs to DeepSpeed: sharding here is HSDP; use --fsdp_shard_degree and --fsdp_num_replicas"
_OFFLOAD = "is not offered: nothing is kept in host memory; shard further with --fsdp_shard_degree"
_ATTENTION = "has no use here: attention takes the fastest kernel that the device has; leave it out"
_CACHE = "has no use here: caches are keyed by content, so they are never stale; --cache_dir says where they are"
_COLUMNS = "has no use here: rows have one form, which docs/data.md describes; leave it out"
_QUANTIZED = "is not offered: optimizer states stay in float32, sharded; use --fsdp_shard_degree to make them smaller"
_REVISION = "is not offered: download that revision and give its folder to {}"
_LOAD_BALANCING = "has no use here: mixture-of-experts models are not supported; leave it out"
_CHECKPOINTING = "is called --activation_checkpointing here: none, full or selected_modules"

SYNONYMS: dict[str, str] = {
    "sequence_parallel_size": "context_parallel_degree",
    "advantages": "advantage_normalization_type",
}
"""Other names of flags, theirs and shorter ones."""

UPSTREAM_FLAGS: dict[str, str] = {
    # the same thing under another name
    "dpo_beta": "is called --beta here",
    "dpo_loss_type": "is called --loss_type here",
    "dpo_gamma_beta_ratio": "is called --gamma_beta_ratio here",
    "dpo_label_smoothing": "is called --label_smoothing here",
    "dataset_mixer_list": "is called --mixer_list here",
    "dataset_mixer_list_splits": "is called --mixer_list_splits here",
    "dataset_mixer": "is a list of words here: --mixer_list NAME AMOUNT NAME AMOUNT",
    "dataset_mixer_eval_list": "is called --eval_mixer_list here",
    "dataset_mixer_eval_list_splits": "is called --eval_mixer_list_splits here",
    "dataset_name": "is part of the mixer list here: --mixer_list NAME 1.0",
    "train_file": "is part of the mixer list here: --mixer_list FILE 1.0",
    "max_train_samples": "is part of the mixer list here: --mixer_list NAME COUNT",
    "num_train_epochs": "is called --num_epochs here",
    "tokenizer_name": "is called --tokenizer_name_or_path here",
    "clip_grad_norm": "is called --max_grad_norm here (0, not -1, turns clipping off)",
    "timeout": "is called --dist_timeout_s here",
    "shard_degree": "is called --fsdp_shard_degree here",
    "num_replicas": "is called --fsdp_num_replicas here",
    "wandb_project": "is called --wandb_project_name here",
    "run_name": "is called --exp_name here",
    "with_tracking": "is called --report_to wandb here",
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_mode": f"{_CHECKPOINTING}; a budget is --activation_memory_budget with --compile_model",
    "mixed_precision": "is called --param_dtype here: bfloat16 or float32",
    # data
    "dataset_config_name": "is not offered: save that configuration as .jsonl or .parquet and name the file",
    "dataset_mix_dir": "has no use here: a mixture is not written to disk; --cache_dir keeps the tokenised rows",
    "dataset_transform_fn": _COLUMNS,
    "dataset_target_columns": _COLUMNS,
    "transform_fn": _COLUMNS,
    "target_columns": _COLUMNS,
    "dataset_cache_mode": _CACHE,
    "dataset_local_cache_dir": _CACHE,
    "dataset_skip_cache": _CACHE,
    "dataset_config_hash": _CACHE,
    "cache_mode": _CACHE,
    "local_cache_dir": _CACHE,
    "skip_cache": _CACHE,
    "config_hash": _CACHE,
    "overwrite_cache": _CACHE,
    "cache_dataset_only": "is covered by --cache_logprobs_only, which stops after rows and reference are cached",
    "preprocessing_num_workers": "has no use here: rows are tokenised once and cached; leave it out",
    "add_bos": "has no use here: the chat template alone decides on special tokens; choose --chat_template_name",
    "use_slow_tokenizer": "has no use here: tokenizers are always the fast ones; leave it out",
    # model
    "config_name": "has no use here: the architecture is read from the checkpoint's own config.json; leave it out",
    "model_revision": _REVISION.format("--model_name_or_path"),
    "tokenizer_revision": _REVISION.format("--tokenizer_name_or_path"),
    "trust_remote_code": "is refused: no code from a checkpoint is ever run; only safetensors and JSON are read",
    "low_cpu_mem_usage": "has no use here: every rank reads only its own shards; leave it out",
    "use_flash_attn": _ATTENTION,
    "attn_backend": _ATTENTION,
    "attn_implementation": _ATTENTION,
    "use_liger_kernel": "is not offered; --compile_model fuses kernels on CUDA",
    "use_lora": _LORA,
    "use_qlora": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    # optimisation
    "use_8bit_optimizer": _QUANTIZED,
    "dpo_use_paged_optimizer": _QUANTIZED,
    "use_paged_optimizer": _QUANTIZED,
    "fused_optimizer": "has no use here: AdamW is fused wherever there is CUDA; leave it out",
    "reduce_loss": "has no use here: the loss is the mean over the global batch; leave it out",
    "concatenated_forward": "has no use here: chosen and rejected share one forward; for less memory give fewer "
    "--per_device_train_batch_size",
    "load_balancing_loss": _LOAD_BALANCING,
    "load_balancing_weight": _LOAD_BALANCING,
    # sharding
    "zero_stage": _DEEPSPEED,
    "zero_hpz_partition_size": _DEEPSPEED,
    "deepspeed": _DEEPSPEED,
    "deepspeed_config": _DEEPSPEED,
    "deepspeed_config_file": _DEEPSPEED,
    "use_deepspeed": _DEEPSPEED,
    "deepspeed_multinode_launcher": _DEEPSPEED,
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "sync_each_batch": "has no use here: the trainer decides when gradients are reduced; leave it out",
    "num_processes": "is torchrun's business: torchrun --nproc_per_node N",
    "num_machines": "is torchrun's business: torchrun --nnodes N",
    "nproc_per_node": "is torchrun's own flag: write it before the script, torchrun --nproc_per_node N …",
    "nnodes": "is torchrun's own flag: write it before the script, torchrun --nnodes N …",
    # the run
    "resume_from_checkpoint": "has no use here: the same command resumes from the last checkpoint in --output_dir",
    "logging_steps": "has no use here: every step is one line of metrics.jsonl; leave it out",
    "add_seed_and_date_to_exp_name": "has no use here: the run is named by --exp_name or its output folder",
    "profiling": "is not offered; leave it out",
    # uploads and evaluation jobs
    "push_to_hub": _HUB,
    "save_to_hub": _HUB,
    "hf_entity": _HUB,
    "hf_repo_id": _HUB,
    "hf_repo_revision": _HUB,
    "hf_repo_url": _HUB,
    "hf_metadata_dataset": _HUB,
    "gs_bucket_path": "has no use here: nothing is ever uploaded; copy OUT/hf_model where you need it",
    "try_launch_beaker_eval_jobs": _BEAKER,
    "try_auto_save_to_beaker": _BEAKER,
    "oe_eval_tasks": _BEAKER,
    "oe_eval_max_length": _BEAKER,
    "oe_eval_gpu_multiplier": _BEAKER,
    "eval_workspace": _BEAKER,
    "eval_priority": _BEAKER,
}
