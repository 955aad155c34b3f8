"""The work of one rank in one optimizer step, from the flags of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.lora import MODULES_OF_TARGETS, LoRASection
from open_instruct.config.rollout_sections import FleetSection
from open_instruct.config.sections import MemorySection
from open_instruct.config.training import TrainingConfig
from open_instruct.errors import InputError
from open_instruct.models.hf.names import names_module
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.policy_gradient import chooses_tokens, measures_entropy
from open_instruct.objectives.registry import OBJECTIVES, objective_named
from open_instruct.planning.subject.model import BYTES_OF_DTYPE, Adapters, ModelShape
from open_instruct.planning.subject.public_models import model_shape
from open_instruct.records import ShardLayout

RunConfig = TrainingConfig | GRPOConfig
GRPO = "grpo"
REFERENCE, TEACHER = "reference policy", "teacher"
MIB = 2**20
# Of an engine on CUDA where the flags say nothing; source: `engines/batching.py`, and vLLM's `get_batch_defaults`.
ENGINE_TOKENS, ENGINE_SEQS = 16384, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Forward passes without gradients: in every step, `num_rounds` over each microbatch of an update.

    Those of a frozen model that stands beside the policy, sharded as it is, where `stands_as` names one; else the
    policy's own. One that `moves` is in checkpoints too. `num_values` are computed of each label: its log-prob, and its
    entropy if there are two. With 0 the head is not run: its matrix stays whole on every rank, and the policy's head
    multiplies with it.

    Example: the reference policy of GRPO with two mini-batches::

        Scoring(shape=model_shape("allenai/OLMo-2-1124-7B"), stands_as="reference policy", num_rounds=2)
    """

    shape: ModelShape
    stands_as: str = ""
    moves: bool = False
    num_rounds: int = 1
    num_values: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rank's share of an optimizer step, at most: documents are taken to have their full length.

    Tokens are those of a whole row; a context degree splits them further. `num_values` are computed of each label that
    is learned: its log-prob, and what the loss reads beside. `num_updates` is above 1 for GRPO alone: mini-batches by
    epochs, each of `num_microbatches`; where an update `reduces_last` those add up whole gradients. So many blocks are
    `gathered_ahead` of their turn forward. `reference_pass_tokens` are those of a microbatch of the pass over the start
    weights before training, 0 where there is none. `kv_cache_bytes` are an engine's on the learner's own device, those
    of its steps too: 0 unless they share one. `sync_crosses_nodes` unless engines are known to be on its node; one that
    `sends_adapter` sends that alone. A run that `copies_checkpoints` writes them while the training goes on.

    `shared_prefix_tokens` lie in a row once for the `documents_per_group` that begin with them; `tokens_per_microbatch`
    counts what lies in the row. `pack_tokens` is what a row of GRPO can hold, more than that where documents of full
    length leave a rest of it; memory is planned for a row that shorter ones fill.

    Example: DPO with 1 pair of 2 x 2048 tokens a microbatch, 4 microbatches a step::

        Workload(algorithm="dpo", tokens_per_microbatch=4096, longest_sequence=2048,
                 label_tokens_per_microbatch=4096, num_microbatches=4, reference_pass_tokens=4096)
    """

    algorithm: str
    tokens_per_microbatch: int
    longest_sequence: int
    label_tokens_per_microbatch: int
    num_microbatches: int
    num_updates: int = 1
    reduces_last: bool = False
    gathered_ahead: int = 0
    pack_tokens: int = 0
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    optimizer: Literal["adamw", "skip_step_adamw", "muon"] = "adamw"
    checkpointing: Literal["none", "full", "selected_modules", "offload"] = "none"
    checkpointing_modules: tuple[str, ...] = ()
    activation_memory_budget: float = 1.0
    on_cuda: bool = True
    copies_checkpoints: bool = False
    reference_pass_tokens: int = 0
    scorings: tuple[Scoring, ...] = ()
    shared_prefix_tokens: int = 0
    documents_per_group: int = 1
    temperature: float = 1.0
    records_entropy: bool = False
    num_values: int = 1
    export_bytes_per_param: int = 2
    num_engines: int = 0
    shares_device: bool = False
    engine_tensor_degree: int = 1
    sync_backend: str = "nccl"
    sync_bucket_bytes: int = 0
    sync_bytes_per_param: int = 2
    sync_crosses_nodes: bool = True
    sends_adapter: bool = False
    kv_cache_bytes: int = 0

    @property
    def tokens_per_group(self) -> int:
        """What the documents of a group take in a row, each of the greatest length."""
        own = self.longest_sequence - self.shared_prefix_tokens
        return self.shared_prefix_tokens + self.documents_per_group * own

    @property
    def row_tokens_per_microbatch(self) -> int:
        """Tokens of the documents of a microbatch, each counted with its prompt."""
        num_sharing = sum(num_documents - 1 for num_documents in self.groups_of_microbatch[0])
        return self.tokens_per_microbatch + num_sharing * self.shared_prefix_tokens

    @property
    def groups_of_microbatch(self) -> tuple[list[int], int]:
        """The documents of full length that each group in a row has, the last one cut; and tokens that are left."""
        num_groups, rest = divmod(self.tokens_per_microbatch, self.tokens_per_group)
        own, groups = self.longest_sequence - self.shared_prefix_tokens, [self.documents_per_group] * num_groups
        if num_more := max(0, rest - self.shared_prefix_tokens) // own:
            return [*groups, num_more], rest - self.shared_prefix_tokens - num_more * own
        return groups, rest

    def with_full_rows(self) -> Workload:
        """The same with rows that are full to the last token."""
        if self.pack_tokens <= self.tokens_per_microbatch:
            return self
        num_labels = self.label_tokens_per_microbatch * self.pack_tokens // self.tokens_per_microbatch
        return replace(self, tokens_per_microbatch=self.pack_tokens, label_tokens_per_microbatch=num_labels)

    @property
    def merges_adapters(self) -> bool:
        """Whether adapters, if there are any, are added to the weights that engines are sent."""
        return self.num_engines > 0 and not self.sends_adapter

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return BYTES_OF_DTYPE[self.param_dtype]


def objective_of(config: TrainingConfig) -> Objective:
    """The registered objective whose flags these are.

    Raises:
        InputError: there is none.
    """
    # The most special one, where flags are those of another and some more.
    by_class = {objective.config_class: objective for objective in map(objective_named, OBJECTIVES)}
    for kind in type(config).__mro__:
        if kind in by_class:
            return by_class[kind]
    raise InputError(f"no registered objective has the flags of {type(config).__name__}, so it cannot be planned")


def validate(config: RunConfig) -> list[str]:
    """What the run itself checks of its flags; returns warnings.

    Raises:
        InputError: listing every problem.
    """
    return validate_grpo(config) if isinstance(config, GRPOConfig) else objective_of(config).validate(config)


def workload_of(
    config: RunConfig, shape: ModelShape, layout: ShardLayout, *, device_memory_bytes: int = 0, prompt_tokens: int = 0
) -> Workload:
    """The workload of a run, from its own flags.

    Args:
        config: validated.
        layout: of the learners.
        device_memory_bytes: of one GPU; an engine that shares the learner's takes a part of it.
        prompt_tokens: those that the replies of a pair, or the completions of a group, share.
    """
    # A prompt's last token is computed for each reply.
    prefix_tokens = max(prompt_tokens - 1, 0)
    if isinstance(config, GRPOConfig):
        workload = _rollout_workload(config, shape, layout, device_memory_bytes, prefix_tokens)
    else:
        workload = _row_workload(config, objective_of(config), shape, prefix_tokens)
    return replace(
        workload,
        shared_prefix_tokens=prefix_tokens,
        reduces_last=config.parallel.gradient_reduction == "last",
        gathered_ahead=config.parallel.fsdp_prefetch_factor,
        param_dtype=config.model.param_dtype,
        optimizer=config.optim.optimizer,
        **_checkpointing(config.memory),
        export_bytes_per_param=BYTES_OF_DTYPE.get(config.run.export_dtype, shape.checkpoint_bytes_per_param),
    )


def shape_of_run(config: RunConfig, model: str) -> ModelShape:
    """The start model with the head and the adapters that the run gives it; see `model_shape`."""
    shape = adapted(model_shape(model), config.adapters)
    if isinstance(config, GRPOConfig) or objective_of(config).head == "vocabulary":
        return shape
    return replace(shape, scores=True, is_tied=False)


def adapted(shape: ModelShape, lora: LoRASection | None) -> ModelShape:
    """The same model with the adapters of a run, or with none."""
    if lora is None:
        return shape if shape.adapters is None else replace(shape, adapters=None)
    modules = tuple(MODULES_OF_TARGETS[target] for target in lora.targets)
    return replace(shape, adapters=Adapters(rank=lora.lora_r, modules=modules, drops=lora.lora_dropout > 0))


def _row_workload(config: TrainingConfig, objective: Objective, shape: ModelShape, prefix_tokens: int) -> Workload:
    documents_per_row, longest = objective.rows_of(config).documents_per_row, config.data.max_seq_length
    num_learned, num_rows = objective.documents_learned or documents_per_row, config.optim.per_device_train_batch_size
    num_tokens, num_scored = (
        num_rows * (num * longest - (num - 1) * prefix_tokens) for num in (num_learned, documents_per_row)
    )
    moves, teacher = bool(objective.reference_moves(config).get("update_freq")), objective.teacher(config)
    loss, scorings = objective.bind(config), list[Scoring]()
    # Other documents are looked at where the row has some that are not learned.
    if loss.prepare is not None and (loss.looks_at is None or num_learned < documents_per_row):
        scorings.append(Scoring(shape=shape, num_values=1 + loss.with_entropy))
    if moves:
        scorings.append(Scoring(shape=shape, stands_as=REFERENCE, moves=True))
    # One of whose distributions a part is kept is gone before the first step.
    if teacher is not None and teacher.keep is None:
        stands_as = "" if _is_own_teacher(config, teacher.model_name_or_path) else TEACHER
        scorings.append(Scoring(shape=model_shape(teacher.model_name_or_path), stands_as=stands_as, num_values=0))
    return Workload(
        algorithm=objective.name,
        tokens_per_microbatch=num_tokens,
        longest_sequence=longest,
        label_tokens_per_microbatch=num_rows * documents_per_row if objective.rows.reads_ends else num_tokens,
        num_microbatches=config.optim.gradient_accumulation_steps,
        documents_per_group=num_learned,
        reference_pass_tokens=num_scored if objective.needs_reference(config) and not moves else 0,
        scorings=tuple(scorings),
        num_values=1 + loss.with_entropy + loss.with_collisions + (teacher is not None),
    )


def _is_own_teacher(config: RunConfig, teacher: str) -> bool:
    """Whether it is the policy with its adapters off, as far as names tell."""
    return config.adapters is not None and teacher == config.model.model_name_or_path


def _rollout_workload(
    config: GRPOConfig, shape: ModelShape, layout: ShardLayout, device_memory_bytes: int, prefix_tokens: int
) -> Workload:
    longest, group = config.data.max_seq_length, config.rollout.num_samples_per_prompt_rollout
    own_tokens = longest - prefix_tokens
    # Completions of full length in a microbatch, whole groups and one that is cut; short ones leave fewer microbatches.
    num_groups, rest = divmod(config.max_tokens_per_microbatch, prefix_tokens + group * own_tokens)
    num_that_fit = max(1, num_groups * group + max(0, rest - prefix_tokens) // own_tokens)
    fleet, loss, num_given = config.fleet, config.loss, config.data.sft_rows_per_step
    num_completions_of_rank, num_given_to_rank = (
        ceil(ceil(num / loss.num_mini_batches) / layout.data_parallel_world_size)
        for num in (config.num_completions_per_step, num_given)
    )
    num_microbatches = -(-num_completions_of_rank // num_that_fit)
    num_in_row = -(-num_completions_of_rank // num_microbatches)
    num_tokens = -(-num_in_row // group) * prefix_tokens + num_in_row * own_tokens
    num_updates, teacher = loss.num_mini_batches * loss.num_epochs, loss.teacher_model_name_or_path
    frozen = Scoring(shape=shape, num_rounds=loss.num_mini_batches)
    scorings = [frozen] if num_updates > 1 else []
    if loss.beta > 0:
        # Of a policy with adapters it is that policy with them off.
        beside = replace(frozen, stands_as=REFERENCE, moves=loss.ref_policy_update_freq is not None)
        scorings.append(frozen if config.adapters else beside)
    if teacher is not None:
        beside = replace(frozen, stands_as=TEACHER, shape=model_shape(teacher))
        scorings.append(frozen if _is_own_teacher(config, teacher) else beside)
    if chooses_tokens(loss):
        scorings.append(Scoring(shape=shape, num_rounds=num_updates, num_values=1 + measures_entropy(loss)))
    shares_device = config.parallel.single_gpu_mode
    on_auto = "ipc" if shares_device else "nccl"
    sync_dtype = config.model.param_dtype if fleet.vllm_dtype == "policy" else fleet.vllm_dtype
    sync_bytes_per_param = BYTES_OF_DTYPE[sync_dtype]
    cache_bytes = _cache_bytes(fleet, shape, sync_bytes_per_param, device_memory_bytes) if shares_device else 0
    return Workload(
        algorithm=GRPO,
        tokens_per_microbatch=num_tokens,
        longest_sequence=longest,
        label_tokens_per_microbatch=num_tokens,
        documents_per_group=group,
        # Conversations lie in microbatches of their own.
        num_microbatches=num_microbatches + ceil(num_given_to_rank / (config.max_tokens_per_microbatch // longest)),
        pack_tokens=config.max_tokens_per_microbatch,
        num_updates=num_updates,
        scorings=tuple(scorings),
        temperature=config.rollout.temperature,
        records_entropy=measures_entropy(loss),
        num_values=1 + measures_entropy(loss),
        num_engines=fleet.vllm_num_engines,
        shares_device=shares_device,
        engine_tensor_degree=fleet.vllm_tensor_parallel_size,
        sync_backend=on_auto if fleet.weight_sync_backend == "auto" else fleet.weight_sync_backend,
        sync_bucket_bytes=fleet.weight_sync_bucket_mib * MIB,
        sync_bytes_per_param=sync_bytes_per_param,
        sends_adapter=config.sent_adapter is not None,
        kv_cache_bytes=cache_bytes,
    )


def is_wrapped(patterns: Iterable[str], layer: int, module: str) -> bool:
    """Whether --activation_checkpointing_modules names this module of a layer; "" is the layer itself."""
    name = f"blocks.{layer}.{module}".rstrip(".")
    return names_module(patterns, name)


def _checkpointing(memory: MemorySection) -> dict[str, Any]:
    if memory.activation_memory_budget < 1.0:
        return {"activation_memory_budget": memory.activation_memory_budget}
    mode = "none" if memory.activation_checkpointing == "auto" else memory.activation_checkpointing
    modules = memory.activation_checkpointing_modules if mode == "selected_modules" else ()
    return {"checkpointing": mode, "checkpointing_modules": tuple(modules)}


def _cache_bytes(fleet: FleetSection, shape: ModelShape, bytes_per_param: int, device_memory_bytes: int) -> int:
    """Bytes of an engine beyond its weights. By default vLLM takes a share of the GPU, and these are the rest of that.

    With --vllm_kv_cache_mib they are the cache, a block's activations for all tokens, and all sequences' logits twice.
    """
    if fleet.vllm_kv_cache_mib is None:
        share = int(fleet.vllm_gpu_memory_utilization * device_memory_bytes)
        return max(0, share - shape.num_params * bytes_per_param)
    tokens = fleet.vllm_max_num_batched_tokens or ENGINE_TOKENS
    block_bytes = tokens * (3 * shape.d_ff + 4 * shape.d_model) * bytes_per_param
    logit_bytes = 2 * (fleet.vllm_max_num_seqs or ENGINE_SEQS) * shape.vocab_size * 4
    return fleet.vllm_kv_cache_mib * MIB + block_bytes + logit_bytes
