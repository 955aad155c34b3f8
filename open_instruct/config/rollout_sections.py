"""The flags that only GRPO has, in the groups `--help` shows them in; see sections.py for the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.sections import ParallelSection, PrefixSharing, RunSection, flag, free_flag
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import OVER_TOKENS, POLICY_LOSSES

# vLLM's `_MAX_TEMP`: vLLM raises any temperature between 0 and this to this.
LEAST_TEMPERATURE = 0.01


@dataclass(kw_only=True)
class PromptDataSection:
    """Prompts"""

    dataset_mixer_list: list[str] = flag(
        "alternating names and amounts: 'prompts.jsonl 1.0 other.parquet 500'; an amount with a dot is a "
        "fraction of the rows (above 1.0 repeats rows), one without is a count"
    )
    dataset_mixer_list_splits: list[str] = flag("split of each data set, or one for all", ["train"])
    dataset_mixer_eval_list: list[str] = free_flag("held-out prompts, in the same form", [])
    dataset_mixer_eval_list_splits: list[str] = free_flag("split of each held-out data set, or one for all", ["train"])
    sft_mixer_list: list[str] = flag(
        "conversations, in the same form, some of which every step learns from beside its completions", []
    )
    sft_mixer_list_splits: list[str] = flag("split of each data set of conversations, or one for all", ["train"])
    sft_rows_per_step: int = flag("conversations of one step", 0, minimum=0)
    columns: list[str] = flag(
        "what rows should have, and the column they have it in: 'prompt=question ground_truth=answer'", []
    )
    max_prompt_token_length: int = flag("tokens; longer prompts are left out and counted", 256, minimum=1)
    response_length: int = flag("tokens that the policy may generate for a prompt", 256, minimum=1)
    chat_template_name: str | None = flag("a built-in template, or a Jinja file; default: the tokenizer's own", None)
    add_bos: bool = flag("write the tokenizer's bos token before what the template writes", False)
    system_prompt_override_file: str | None = flag(
        "text file whose content is the system turn of every prompt, in place of the row's own", None
    )
    on_bad_row: Literal["error", "skip"] = free_flag("stop at the first malformed row, or skip and count it", "error")
    cache_dir: str | None = free_flag(
        "where tokenised prompts are kept; default: $OPEN_INSTRUCT_CACHE or ~/.cache/open_instruct", None
    )

    length_flags: ClassVar[str] = "--max_prompt_token_length and --response_length together:"

    @property
    def max_seq_length(self) -> int:
        """Tokens of the longest prompt plus those of the longest response."""
        return self.max_prompt_token_length + self.response_length


@dataclass(kw_only=True)
class RolloutSection:
    """Rollouts"""

    num_unique_prompts_rollout: int = flag("prompts of one step", 16, minimum=1)
    num_samples_per_prompt_rollout: int = flag("completions of each prompt: the size of a group", 4, minimum=1)
    total_episodes: int = flag(
        "completions of the whole run; the number of steps is this over those of a step",
        102400,
        minimum=1,
        resume="length",
    )
    temperature: float = flag(
        "of sampling; the learner's log-probs are taken under it too",
        1.0,
        minimum=LEAST_TEMPERATURE,
        note=", which is what the engine takes for anything lower, unlike the learner",
    )
    vllm_top_p: float = flag("nucleus sampling; only 1.0 leaves the ratio of learner to engine unbiased", 1.0)
    stop_strings: list[str] = flag("texts that end a completion, beside the end-of-turn token", [])
    async_steps: int = flag("steps that generation may run ahead of training; 0 is on-policy", 1, minimum=0)
    inflight_updates: bool = flag(
        "new weights reach completions that are being generated; otherwise those are finished first", True
    )
    active_sampling: bool = flag("replace groups without a learning signal by further prompts", False)
    no_resampling_pass_rate: float | None = flag(
        "never ask a prompt again once this share of its group scored the full reward", None, above=0, maximum=1
    )
    filter_zero_std_samples: bool = flag("leave out groups whose rewards are all the same", True)
    mask_truncated_completions: bool = flag("learn nothing from completions that were cut at the length limit", False)
    advantage_normalization_type: str = flag(
        "from rewards to advantages: reward minus the group's mean, divided by its standard deviation, by nothing, or "
        "as docs/losses.md says (also: --advantages)",
        "standard",
        choices=ADVANTAGES,
        takes_own=True,
    )
    advantage_pass_k: int = flag("pass_at_k: one of so many completions is to be right", 4, minimum=1)


@dataclass(kw_only=True)
class RewardSection:
    """Rewards"""

    verification_reward: float = flag("reward of a completion that its verifiers accept in full", 1.0, above=0)
    verifier: list[str] = flag(
        "what judges prompts that name no verifier, and may be named by others: the NAME of an installed one, "
        "FILE.py:NAME or module:NAME of a function or class of your own, reward_model:FOLDER or prm:FOLDER of a run",
        [],
    )
    remap_verifier: list[str] = flag("OLD=NEW: prompts that name the verifier OLD are judged by NEW", [])
    several_verifiers: Literal["mean", "sum"] = flag(
        "of a prompt's verifiers, the mean of their scores or the sum, both weighted", "mean"
    )
    verifier_timeout_s: float = free_flag("seconds that one verdict may take before it counts as 0", 10.0, above=0)
    num_verifier_processes: int = free_flag("processes for verifiers that run foreign code", 2, minimum=1)
    apply_r1_style_format_reward: bool = flag("reward <think>…</think><answer>…</answer>", False)
    r1_style_format_reward: float = flag("what that form is worth", 1.0)
    additive_format_reward: bool = flag("add the verifiers' reward also where the form is wrong", False)
    non_stop_penalty: bool = flag("give completions that were cut at the length limit a fixed reward", False)
    non_stop_penalty_value: float = flag("that fixed reward", 0.0)


@dataclass(kw_only=True)
class PolicyLossSection:
    """Loss"""

    loss_fn: str = flag("the policy loss", "dapo", choices=POLICY_LOSSES, takes_own=True)
    clip_lower: float = flag("the ratio of new to old policy is clipped to at least 1 minus this", 0.2, above=0)
    clip_higher: float = flag("the ratio of new to old policy is clipped to at most 1 plus this", 0.2, above=0)
    delta: float | None = flag(
        "two-sided clip: where the advantage is negative the ratio is at most this; in dppo_tv and dppo_kl, which have "
        "no other bound on it, everywhere; above 1 plus --clip_higher",
        None,
    )
    cispo_clamp_below: bool = flag("cispo: clamp the ratio from below too, at 1 minus --clip_lower", False)
    sapo_temperature_pos: float = flag("sapo: steepness of the gate where the advantage is positive", 1.0, above=0)
    sapo_temperature_neg: float = flag("sapo: steepness of the gate where it is not", 1.05, above=0)
    cov_fraction: float = flag("clip_cov, kl_cov: share of the tokens that is singled out", 2e-4, above=0, maximum=1)
    clip_cov_lower: float = flag("clip_cov: the least covariance of those", 1.0)
    clip_cov_upper: float = flag("clip_cov: the largest covariance of those", 5.0)
    kl_cov_coef: float = flag("kl_cov: weight of the divergence from the step's start at those", 1.0, minimum=0)
    top_entropy_quantile: float = flag(
        "learn from this share of the tokens, those where the policy is least certain", 1.0, above=0, maximum=1
    )
    rl_coef: float = flag("weight of the policy loss; 0 leaves the teacher alone", 1.0, minimum=0)
    ce_coef: float = flag("weight of the cross-entropy of the conversations of --sft_mixer_list", 1.0, minimum=0)
    teacher_model_name_or_path: str | None = flag(
        "folder of a frozen model with the same tokenizer that the policy is drawn to on its own completions", None
    )
    teacher_kl_coef: float = flag("weight of the divergence from the teacher", 1.0, above=0)
    beta: float = flag("weight of the divergence from the reference policy; 0 builds none", 0.0, minimum=0)
    kl_estimator: Literal["0", "1", "2", "3"] = flag(
        "0 difference, 1 half its square, 2 the unbiased and positive one, 3 importance-weighted", "2"
    )
    kl_importance_weighted: bool = flag(
        "multiply the estimate by the ratio of new to old policy (gspo, gmpo, luspo: by that of the whole completion), "
        "which makes it unbiased after the first update",
        False,
    )
    loss_denominator: str = flag(
        f"'token', or a constant number of tokens per completion: {', '.join(OVER_TOKENS)}", "token"
    )
    rho_correction: Literal["none", "clamp", "token_mask", "sequence_mask", "bounds"] = flag(
        "what is done where learner and engine disagree: clamp the importance weight, leave tokens or sequences out, "
        "or both, as bounds of their own say",
        "clamp",
    )
    rho_level: Literal["token", "sequence"] = flag(
        "bounds: one ratio a token, or their geometric mean over the completion", "token"
    )
    rho_clamp_lower: float = flag("bounds: the importance weight is at least this", 0.0, minimum=0)
    rho_clamp_upper: float | None = flag("bounds: and at most this; none is no bound", None, above=0)
    rho_mask_lower: float = flag("bounds: what has a ratio below this is left out", 0.0, minimum=0)
    rho_mask_upper: float | None = flag("bounds: and what has one above this; none is no bound", None, above=0)
    rho_cap: float = flag(
        "the importance weight is clamped to this, or masked outside 1/cap to cap",
        2.0,
        above=1,
        note=" (1 is perfect agreement)",
    )
    num_mini_batches: int = flag("optimizer steps that a step's completions are split into", 1, minimum=1)
    num_epochs: int = flag("times that a step's completions are learned from", 1, minimum=1)
    record_entropy: bool = free_flag("measure the policy's entropy at every token", False)
    alpha: float = flag(
        "share of the policy in the reference at its update; 1 replaces the reference", 0.6, above=0, maximum=1
    )
    ref_policy_update_freq: int | None = flag(
        "steps between updates of the reference policy; none leaves it", None, minimum=1
    )
    pack_length: int | None = free_flag(
        "tokens of one packed microbatch; default: 4096, or the longest prompt with its response if that is more", None
    )
    prefix_sharing: PrefixSharing = free_flag(
        "compute a prompt once for the completions of its group; 'auto' where that saves at least 5% of the tokens",
        "auto",
    )


@dataclass(kw_only=True)
class LearnerParallelSection(ParallelSection):
    """Sharding"""

    more_ranks: ClassVar[str] = "--num_learners_per_node {0} starts them"

    num_learners_per_node: list[int] = free_flag("learner processes on each node, such as '8 8' or '2 4'", [1])


@dataclass(kw_only=True)
class FleetSection:
    """Fleet"""

    vllm_num_engines: int = free_flag("vLLM engines", 1, minimum=1)
    vllm_tensor_parallel_size: int = free_flag("GPUs of one engine", 1, minimum=1)
    vllm_gpu_memory_utilization: float = free_flag(
        "share of a GPU's memory that an engine takes (CUDA)", 0.9, above=0, maximum=1
    )
    vllm_kv_cache_mib: int | None = free_flag(
        "MiB of an engine's key-value cache; default: 256 on a CPU, the rest on CUDA", None, minimum=1
    )
    vllm_max_num_seqs: int | None = free_flag(
        "completions that one engine generates at once, at most; default: 256 on CUDA, 64 on a CPU", None, minimum=1
    )
    vllm_max_num_batched_tokens: int | None = free_flag(
        "tokens that an engine computes in one step, at most, those of prompts included; default: on CUDA what vLLM's "
        "LLM class takes (16384, or 8192 on an A100 or less than 70 GiB), on a CPU 4096 or the longest prompt with its "
        "response",
        None,
        minimum=1,
    )
    vllm_async_scheduling: Literal["auto", "on", "off"] = free_flag(
        "schedule an engine's next step while this one is computed; 'auto': on CUDA", "auto"
    )
    vllm_enable_prefix_caching: bool = free_flag("compute a prompt's keys and values once for its group", True)
    vllm_enforce_eager: bool = free_flag("run the engine without CUDA graphs", False)
    vllm_dtype: Literal["bfloat16", "float32", "policy"] = flag(
        "dtype of the engines; 'policy' is --param_dtype", "policy"
    )
    ray_address: str | None = free_flag(
        "'auto' or the address of a Ray cluster to join; default: start a local one", None
    )
    ray_dashboard_host: str | None = free_flag("address that Ray's dashboard binds to; default: no dashboard", None)
    cluster_timeout_s: int = free_flag("seconds to wait for the nodes and GPUs that were asked for", 600, minimum=1)
    engine_timeout_s: int = free_flag(
        "seconds to wait for an engine to start or to answer a health check", 600, minimum=1
    )
    step_timeout_s: int = free_flag("seconds to wait for the learners to finish one step", 3600, minimum=1)
    max_restarts: int = free_flag("times that dead learners or engines are started again", 3, minimum=0)
    weight_sync_backend: Literal["auto", "nccl", "gloo", "shm", "ipc"] = free_flag(
        "how weights travel to the engines; 'auto': ipc on one shared device, nccl on CUDA, else shm on one host and "
        "gloo across hosts",
        "auto",
    )
    weight_sync_bucket_mib: int = free_flag("MiB of weights that travel at once", 256, minimum=1)
    weight_sync_timeout_s: int = free_flag("seconds to wait for an engine during a weight sync", 300, minimum=1)
    lora_sync: Literal["merged", "adapter"] = free_flag(
        "with --use_lora, what engines are sent: the model with its adapter 'merged', or the 'adapter' alone", "merged"
    )

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines together."""
        return self.vllm_num_engines * self.vllm_tensor_parallel_size


@dataclass(kw_only=True)
class EvaluationSection:
    """Evaluation"""

    local_eval_every: int = free_flag(
        "steps between evaluations on the held-out prompts; 0 only at the end", 100, minimum=0
    )
    eval_on_step_0: bool = free_flag("evaluate before the first step too", False)
    eval_num_samples: int | None = free_flag(
        "completions of each held-out prompt; default: the largest k of --eval_pass_at_k", None, minimum=1
    )
    eval_pass_at_k: list[int] = free_flag("report the chance that one of k completions is right, for each k", [1])
    eval_temperature: float = free_flag("of sampling in evaluations; 0 takes the likeliest token", 1.0, minimum=0)
    eval_top_p: float = free_flag("nucleus sampling in evaluations", 1.0, above=0, maximum=1)

    @property
    def num_samples(self) -> int:
        """Completions of each held-out prompt."""
        return self.eval_num_samples or max([1, *self.eval_pass_at_k])


@dataclass(kw_only=True)
class RolloutRunSection(RunSection):
    """Run directory"""

    save_traces: bool | None = free_flag(
        "keep every step's completions, log-probs, versions and verdicts in OUT/traces, or none of them; default: of "
        "the newest steps, up to 1 GiB",
        None,
    )
