"""What one rank does in one optimizer step, as the flags of a run say it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from open_instruct.config.dpo import DPOConfig
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.losses import PREFERENCE_LOSSES
from open_instruct.config.rollout_sections import FleetSection
from open_instruct.config.sections import MemorySection
from open_instruct.config.sft import SFTConfig
from open_instruct.models.names import names_module
from open_instruct.planning.model_shape import BYTES_OF_DTYPE, ModelShape
from open_instruct.records import ShardLayout

Algorithm = Literal["dpo", "sft", "grpo"]
Checkpointing = Literal["none", "full", "selected_modules"]
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rank's share of an optimizer step, at most: documents are taken to have their full length.

    Tokens are those of a whole row; a context degree splits them further. `num_updates` is above 1 for GRPO alone:
    mini-batches times epochs, each of `num_microbatches`. `has_reference` means a pass over the start weights before
    training for DPO, a model that stays on the GPUs for GRPO. Of the engines, `kv_cache_bytes` is what lies on the
    learner's own device: 0 unless they share one. `sync_crosses_nodes` unless engines are known to be on its node.

    `shared_prefix_tokens` lie in a row once for the `documents_per_group` that begin with them; `tokens_per_microbatch`
    counts what lies in the row. `pack_tokens` is what a row of GRPO can hold, more than that where documents of full
    length leave a rest of it; memory is planned for a row that shorter ones fill.

    Example: DPO with 1 pair of 2 x 2048 tokens a microbatch, 4 microbatches a step::

        Workload(algorithm="dpo", tokens_per_microbatch=4096, longest_sequence=2048,
                 label_tokens_per_microbatch=4096, num_microbatches=4, has_reference=True, reference_pass_tokens=4096)
    """

    algorithm: Algorithm
    tokens_per_microbatch: int
    longest_sequence: int
    label_tokens_per_microbatch: int
    num_microbatches: int
    num_updates: int = 1
    num_epochs: int = 1
    pack_tokens: int = 0
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    optimizer: Literal["adamw", "skip_step_adamw", "muon"] = "adamw"
    checkpointing: Checkpointing = "none"
    checkpointing_modules: tuple[str, ...] = ()
    activation_memory_budget: float = 1.0
    on_cuda: bool = True
    has_reference: bool = False
    reference_pass_tokens: int = 0
    shared_prefix_tokens: int = 0
    documents_per_group: int = 1
    temperature: float = 1.0
    records_entropy: bool = False
    export_bytes_per_param: int = 2
    num_engines: int = 0
    engine_tensor_degree: int = 1
    sync_backend: str = "nccl"
    sync_bucket_bytes: int = 0
    sync_bytes_per_param: int = 2
    sync_crosses_nodes: bool = True
    kv_cache_bytes: int = 0

    @property
    def num_fixed_passes(self) -> int:
        """Passes over a microbatch, in a GRPO step, for log-probs that are fixed during it.

        The reference policy's, if there is one, and where a step has several updates the policy's own before them.
        """
        if self.algorithm != "grpo":
            return 0
        num_models = int(self.has_reference) + int(self.num_updates > 1)
        return num_models * self.num_microbatches * (self.num_updates // self.num_epochs)

    @property
    def tokens_per_group(self) -> int:
        """What the documents of a group take in a row, each of the greatest length."""
        own = self.longest_sequence - self.shared_prefix_tokens
        return self.shared_prefix_tokens + self.documents_per_group * own

    @property
    def row_tokens_per_microbatch(self) -> int:
        """Tokens of the documents of a microbatch, each counted with its prompt."""
        num_groups, num_of_cut_group, _ = self.documents_of_microbatch
        num_sharing = num_groups * (self.documents_per_group - 1) + max(0, num_of_cut_group - 1)
        return self.tokens_per_microbatch + num_sharing * self.shared_prefix_tokens

    @property
    def documents_of_microbatch(self) -> tuple[int, int, int]:
        """Whole groups in a row, documents of full length of a group that is cut, and tokens that are left."""
        num_groups, rest = divmod(self.tokens_per_microbatch, self.tokens_per_group)
        own = self.longest_sequence - self.shared_prefix_tokens
        num_more = max(0, rest - self.shared_prefix_tokens) // own
        return num_groups, num_more, rest - (self.shared_prefix_tokens + num_more * own if num_more else 0)

    def with_full_rows(self) -> Workload:
        """The same with rows that are full to the last token."""
        if self.pack_tokens <= self.tokens_per_microbatch:
            return self
        num_labels = self.label_tokens_per_microbatch * self.pack_tokens // self.tokens_per_microbatch
        return replace(self, tokens_per_microbatch=self.pack_tokens, label_tokens_per_microbatch=num_labels)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return BYTES_OF_DTYPE[self.param_dtype]


def workload_of(
    config: DPOConfig | SFTConfig | GRPOConfig,
    shape: ModelShape,
    layout: ShardLayout,
    *,
    device_memory_bytes: int | None = None,
    label_share: float = 1.0,
    shared_prompt_tokens: int = 0,
) -> Workload:
    """The workload of a run, from its own flags.

    Args:
        config: validated.
        layout: of the learners.
        device_memory_bytes: of one GPU; an engine that shares the learner's takes a part of it.
        label_share: of the tokens, those that have a label. Only the data can tell; 1 is the most there can be.
        shared_prompt_tokens: tokens of the prompt that the replies of a pair, or the completions of a group, share.
    """
    if isinstance(config, GRPOConfig):
        return _grpo(config, shape, layout, device_memory_bytes, label_share, shared_prompt_tokens)
    is_dpo = isinstance(config, DPOConfig)
    num_documents = config.optim.per_device_train_batch_size * (2 if is_dpo else 1)
    # A prompt's last token is computed for each reply.
    prefix_tokens = max(shared_prompt_tokens - 1, 0)
    num_tokens = num_documents * config.data.max_seq_length - num_documents // 2 * prefix_tokens
    has_reference = isinstance(config, DPOConfig) and PREFERENCE_LOSSES[config.loss.loss_type].needs_reference
    checkpointing, modules, budget = _checkpointing(config.memory)
    return Workload(
        algorithm="dpo" if is_dpo else "sft",
        tokens_per_microbatch=num_tokens,
        longest_sequence=config.data.max_seq_length,
        label_tokens_per_microbatch=round(num_tokens * label_share),
        shared_prefix_tokens=prefix_tokens,
        documents_per_group=2 if is_dpo else 1,
        num_microbatches=config.optim.gradient_accumulation_steps,
        param_dtype=config.model.param_dtype,
        optimizer=config.optim.optimizer,
        checkpointing=checkpointing,
        checkpointing_modules=modules,
        activation_memory_budget=budget,
        has_reference=has_reference,
        reference_pass_tokens=num_tokens if has_reference else 0,
        export_bytes_per_param=_export_bytes(config.run.export_dtype, shape),
    )


def _grpo(
    config: GRPOConfig,
    shape: ModelShape,
    layout: ShardLayout,
    device_memory_bytes: int | None,
    label_share: float,
    shared_prompt_tokens: int,
) -> Workload:
    pack_tokens, longest = config.max_tokens_per_microbatch, config.data.max_seq_length
    # Sequences of full length, as many as fit; short ones leave fewer microbatches.
    num_completions = -(-config.num_completions_per_step // config.loss.num_mini_batches)
    num_completions_of_rank = -(-num_completions // layout.data_parallel_world_size)
    prefix_tokens = max(shared_prompt_tokens - 1, 0)
    num_microbatches = -(-num_completions_of_rank // _completions_that_fit(config, pack_tokens, prefix_tokens))
    num_in_row = -(-num_completions_of_rank // num_microbatches)
    num_groups = -(-num_in_row // config.rollout.num_samples_per_prompt_rollout)
    num_tokens = num_groups * prefix_tokens + num_in_row * (longest - prefix_tokens)
    checkpointing, modules, budget = _checkpointing(config.memory)
    fleet, has_reference = config.fleet, config.loss.beta > 0
    needs_old_logprobs = config.loss.num_mini_batches * config.loss.num_epochs > 1
    backend = fleet.weight_sync_backend
    if backend == "auto":
        backend = "ipc" if layout.single_device else "nccl"
    sync_dtype = config.model.param_dtype if fleet.vllm_dtype == "policy" else fleet.vllm_dtype
    sync_bytes_per_param = BYTES_OF_DTYPE[sync_dtype]
    return Workload(
        algorithm="grpo",
        tokens_per_microbatch=num_tokens,
        longest_sequence=longest,
        label_tokens_per_microbatch=round(num_tokens * label_share),
        shared_prefix_tokens=prefix_tokens,
        documents_per_group=config.rollout.num_samples_per_prompt_rollout,
        num_microbatches=num_microbatches,
        pack_tokens=pack_tokens,
        num_updates=config.loss.num_mini_batches * config.loss.num_epochs,
        num_epochs=config.loss.num_epochs,
        param_dtype=config.model.param_dtype,
        optimizer=config.optim.optimizer,
        checkpointing=checkpointing,
        checkpointing_modules=modules,
        activation_memory_budget=budget,
        has_reference=has_reference,
        reference_pass_tokens=num_tokens if has_reference or needs_old_logprobs else 0,
        temperature=config.rollout.temperature,
        records_entropy=config.loss.record_entropy,
        export_bytes_per_param=_export_bytes(config.run.export_dtype, shape),
        num_engines=fleet.vllm_num_engines,
        engine_tensor_degree=fleet.vllm_tensor_parallel_size,
        sync_backend=backend,
        sync_bucket_bytes=fleet.weight_sync_bucket_mib * MIB,
        sync_bytes_per_param=sync_bytes_per_param,
        kv_cache_bytes=_kv_cache_bytes(fleet, shape.num_params * sync_bytes_per_param, device_memory_bytes)
        if layout.single_device
        else 0,
    )


def _completions_that_fit(config: GRPOConfig, pack_tokens: int, prefix_tokens: int) -> int:
    """Completions of full length in a microbatch: whole groups, and one that is cut."""
    longest, group = config.data.max_seq_length, config.rollout.num_samples_per_prompt_rollout
    own_tokens = longest - prefix_tokens
    num_groups, rest = divmod(pack_tokens, prefix_tokens + group * own_tokens)
    return max(1, num_groups * group + max(0, rest - prefix_tokens) // own_tokens)


def is_wrapped(patterns: Iterable[str], layer: int, module: str) -> bool:
    """Whether --activation_checkpointing_modules names this module of a layer; "" is the layer itself."""
    name = f"blocks.{layer}.{module}".rstrip(".")
    return names_module(patterns, name)


def _checkpointing(memory: MemorySection) -> tuple[Checkpointing, tuple[str, ...], float]:
    if memory.activation_memory_budget < 1.0:
        return "none", (), memory.activation_memory_budget
    selected = memory.activation_checkpointing == "selected_modules"
    return memory.activation_checkpointing, tuple(memory.activation_checkpointing_modules) if selected else (), 1.0


def _export_bytes(dtype: str, shape: ModelShape) -> int:
    return shape.checkpoint_bytes_per_param if dtype == "source" else BYTES_OF_DTYPE[dtype]


def _kv_cache_bytes(fleet: FleetSection, weight_bytes: int, device_memory_bytes: int | None) -> int:
    """vLLM takes its share of the whole GPU; the cache is what the engine's weights leave of that."""
    if fleet.vllm_kv_cache_mib is not None:
        return fleet.vllm_kv_cache_mib * MIB
    if device_memory_bytes is None:
        return 0
    return max(0, int(fleet.vllm_gpu_memory_utilization * device_memory_bytes) - weight_bytes)
