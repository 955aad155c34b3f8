"""The work of one rank in one optimizer step, from the flags of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from open_instruct.batching.prefixes import FullRows, saved_tokens
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.lora import MODULES_OF_TARGETS, LoRASection
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.hf.head_kinds import HEAD_SIZES, check_head
from open_instruct.models.hf.names import names_module
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.policy_gradient import chooses_tokens, measures_entropy
from open_instruct.objectives.registry import objective_named, objective_names
from open_instruct.planning.subject.model import BYTES_OF_DTYPE, Adapters, ModelShape, model_shape

RunConfig = TrainingConfig | GRPOConfig
REFERENCE, TEACHER = "reference policy", "teacher"
MIB = 2**20
# Of an engine on CUDA where the flags say nothing; source: `generation/requests.py`, and vLLM's
# `get_batch_defaults`.
ENGINE_TOKENS, ENGINE_SEQS = 16384, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Forward passes without gradients over the microbatches of an update, in every step.

    Example: the reference policy of GRPO with two mini-batches::

        Scoring(shape=model_shape("allenai/OLMo-2-1124-7B"), stands_as="reference policy",
                num_rounds=2)
    """

    shape: ModelShape
    # The label of a frozen model that stands beside the policy, sharded as it is; "": the policy
    # itself scores.
    stands_as: str = ""
    moves: bool = False  # it follows the policy, and is in checkpoints too
    num_rounds: int = 1  # passes over each microbatch
    # Values of each label: its log-prob, and its entropy if there are two. With 0 the head is not
    # run: its matrix stays whole on every rank, and the policy's head multiplies with it.
    num_values: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rank's share of an optimizer step, at most: documents are taken to have their full
    length.

    Example: DPO with 1 pair of 2 x 2048 tokens a microbatch, 4 microbatches a step::

        Workload(algorithm="dpo", tokens_per_microbatch=4096, rows=FullRows(length=2048),
                 label_tokens_per_microbatch=4096, num_microbatches=4, reference_pass_tokens=4096)
    """

    algorithm: str
    # In a whole row, with shared prefixes once; a context degree splits them further.
    tokens_per_microbatch: int
    rows: FullRows  # what they are taken to be filled with
    label_tokens_per_microbatch: int
    num_microbatches: int  # of an update
    num_of_conversations: int = 0  # of them; a critic does not compute these
    num_updates: int = 1  # of GRPO: mini-batches by epochs
    reduces_last: bool = False  # microbatches add up whole gradients, which the last one reduces
    # Blocks whose weights are gathered ahead of their turn in forward passes.
    gathered_ahead: int = 0
    # Of GRPO: the tokens that a row can hold. Memory is planned for such a row, which shorter
    # documents fill.
    pack_tokens: int = 0
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    multiplies_in_float8: bool = False  # matrices of blocks
    optimizer: Literal["adamw", "adamw_8bit", "skip_step_adamw", "muon"] = "adamw"
    has_moments_on_host: bool = False  # which is not the device
    # With what the optimizer steps; gathered, they are on the device.
    has_weights_on_host: bool = False
    checkpointing: Literal["none", "full", "selected_modules", "offload"] = "none"
    checkpointing_modules: tuple[str, ...] = ()
    activation_memory_budget: float = 1.0
    on_cuda: bool = True
    copies_checkpoints: bool = False  # they are written from a copy while the training goes on
    # Of a microbatch of the pass over the start weights before training.
    reference_pass_tokens: int = 0
    scorings: tuple[Scoring, ...] = ()
    # The other model that is trained (PPO), and the passes in which it tells its values.
    critic: Scoring | None = None
    temperature: float = 1.0
    records_entropy: bool = False
    num_values: int = 1  # numbers for each label: its log-prob, and any other that the loss reads
    export_bytes_per_param: int = 2
    num_engines: int = 0
    shares_device: bool = False  # an engine is on the learner's own device
    engine_tensor_degree: int = 1
    sync_backend: str = "nccl"
    sync_bucket_bytes: int = 0
    sync_bytes_per_param: int = 2
    sync_crosses_nodes: bool = True  # unless engines are known to be on the learners' node
    sync_choice: tuple[str, str] = ("dense", "")  # or "delta", what has changed; and why
    sends_adapter: bool = False  # a weight sync sends the adapter alone
    kv_cache_bytes: int = 0  # of an engine that shares the device, with what its steps take

    @property
    def row_tokens_per_microbatch(self) -> int:
        """Tokens of the documents of a microbatch, each counted with its prompt."""
        groups, _ = self.rows.groups_in(self.tokens_per_microbatch)
        return self.tokens_per_microbatch + sum(
            saved_tokens(self.rows.prefix, size) for size in groups
        )

    @property
    def gathered_keys(self) -> int:
        """Keys of a row with those of a shared prefix before each of its documents but the first,
        which follows it.
        """
        num_documents = self.rows.per_group
        return (
            self.tokens_per_microbatch
            * num_documents
            * self.rows.length
            // self.rows.tokens_of(num_documents)
        )

    def with_full_rows(self) -> Workload:
        """The same with rows that are full to the last token."""
        if self.pack_tokens <= self.tokens_per_microbatch:
            return self
        num_labels = (
            self.label_tokens_per_microbatch * self.pack_tokens // self.tokens_per_microbatch
        )
        return replace(
            self, tokens_per_microbatch=self.pack_tokens, label_tokens_per_microbatch=num_labels
        )

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Patterns of the modules of the blocks that run again in the backward pass."""
        modules = {"none": (), "selected_modules": self.checkpointing_modules}
        return modules.get(self.checkpointing, ("blocks.*",))

    def recomputes(self, module: str) -> bool:
        """Whether `module` of all blocks ("attention", "feed_forward", or "" for whole blocks) is
        recomputed.
        """
        return any(is_wrapped(self.recomputed_modules, 0, name) for name in ("", module))

    @property
    def of_critic(self) -> Workload:
        """The work of the critic, which learns from the same completions as often, and goes to no
        engine.
        """
        assert self.critic is not None
        own: dict[str, Any] = {
            "num_microbatches": self.num_microbatches - self.num_of_conversations,
            "num_values": 1,
        }
        no_engines: dict[str, Any] = {
            "num_engines": 0,
            "shares_device": False,
            "sync_choice": ("dense", ""),
        }
        return replace(self, critic=None, scorings=(self.critic,), **own, **no_engines)

    def cache_bytes(self, fleet: FleetSection, shape: ModelShape, device_memory_bytes: int) -> int:
        """Bytes of an engine beyond its weights. By default vLLM takes a share of a GPU, and these
        are the rest.

        With --vllm_kv_cache_mib, and on a CPU, they are the cache, a block's activations for all
        tokens, and all sequences' logits twice.
        """
        cache_mib = fleet.kv_cache_mib(on_cuda=self.on_cuda)
        if cache_mib is None:
            share = int(fleet.vllm_gpu_memory_utilization * device_memory_bytes)
            return max(0, share - shape.num_params * self.sync_bytes_per_param)
        tokens = fleet.vllm_max_num_batched_tokens or ENGINE_TOKENS
        width = max(
            each.d_ff * (shape.experts_per_token if each.num_experts else 1)
            for each in shape.layers
        )
        block_bytes = tokens * (3 * width + 4 * shape.d_model) * self.sync_bytes_per_param
        logit_bytes = 2 * (fleet.vllm_max_num_seqs or ENGINE_SEQS) * shape.vocab_size * 4
        return cache_mib * MIB + block_bytes + logit_bytes

    @property
    def merges_adapters(self) -> bool:
        """Whether the engines are sent the weights with any adapters merged into them."""
        return self.num_engines > 0 and not self.sends_adapter

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return BYTES_OF_DTYPE[self.param_dtype]


def objective_of(config: RunConfig) -> Objective:
    """The registered objective of a config.

    Raises:
        InputError: there is none.
    """
    # The most derived class first, as a config class may inherit another objective's.
    by_class = {
        objective.config_class: objective for objective in map(objective_named, objective_names())
    }
    for kind in type(config).__mro__:
        if kind in by_class:
            return by_class[kind]
    raise InputError(
        (
            f"no registered objective has the flags of {type(config).__name__}, so it cannot be "
            "planned"
        ),
        kind="own_code",
    )


def workload_of(
    config: RunConfig, shape: ModelShape, layout: ShardLayout, *, prompt_tokens: int = 0
) -> Workload:
    """The workload of a run, from its own flags.

    Args:
        config: validated.
        layout: of the learners.
        prompt_tokens: those that the replies of a pair, or the completions of a group, share.
    """
    # A prompt's last token is computed for each reply.
    prefix_tokens = max(prompt_tokens - 1, 0)
    if isinstance(config, GRPOConfig):
        workload = _rollout_workload(config, shape, layout, prefix_tokens)
    else:
        workload = _row_workload(config, objective_of(config), shape, prefix_tokens)
    memory = config.memory
    is_selected = memory.activation_checkpointing == "selected_modules"
    return replace(
        workload,
        reduces_last=config.parallel.gradient_reduction == "last",
        gathered_ahead=config.parallel.fsdp_prefetch_factor,
        param_dtype=config.model.param_dtype,
        multiplies_in_float8=config.model.float8_linears != "off",
        optimizer=config.optim.optimizer,
        checkpointing="none"
        if memory.activation_checkpointing == "auto"
        else memory.activation_checkpointing,
        checkpointing_modules=tuple(memory.activation_checkpointing_modules) if is_selected else (),
        activation_memory_budget=memory.activation_memory_budget,
        export_bytes_per_param=BYTES_OF_DTYPE.get(
            config.run.export_dtype, shape.checkpoint_bytes_per_param
        ),
    )


def shape_of_run(config: RunConfig, model: str) -> ModelShape:
    """The start model with the head and the adapters that the run gives it; see `model_shape`.

    Raises:
        InputError: also where a trained model of the family could not be opened with that head.
    """
    shape = adapted(model_shape(model), config.adapters)
    head = objective_of(config).choose_head(config)
    check_head(shape.family, head)
    return shape if head == "vocabulary" else with_scores(shape, HEAD_SIZES[head])


def with_scores(shape: ModelShape, num: int) -> ModelShape:
    """The same model with a head of so many rows in place of the vocabulary's."""
    return replace(shape, scores=num, is_tied=False)


def adapted(shape: ModelShape, lora: LoRASection | None) -> ModelShape:
    """The same model with the adapters of a run, or with none."""
    if lora is None:
        return shape if shape.adapters is None else replace(shape, adapters=None)
    modules = tuple(MODULES_OF_TARGETS[target] for target in lora.targets)
    adapters = Adapters(
        rank=lora.lora_r, modules=modules, drops=lora.lora_dropout > 0, in_4_bits=lora.use_qlora
    )
    return replace(shape, adapters=adapters)


def _row_workload(
    config: TrainingConfig, objective: Objective, shape: ModelShape, prefix_tokens: int
) -> Workload:
    documents_per_row = objective.choose_rows(config).documents_per_row
    num_learned = objective.documents_learned or documents_per_row
    num_rows = config.optim.per_device_train_batch_size
    length = config.data.max_seq_length
    loss = objective.bind(config)
    num_tokens = num_rows * (num_learned * length - saved_tokens(prefix_tokens, num_learned))
    has_pass_before = objective.needs_reference(config) and not _reference_moves(config, objective)
    scored_tokens = num_rows * (
        documents_per_row * length - saved_tokens(prefix_tokens, documents_per_row)
    )
    has_teacher = objective.teacher(config) is not None
    rows = objective.choose_rows(config)
    num_ends = num_rows * documents_per_row * rows.ends_per_document
    return Workload(
        algorithm=objective.name,
        tokens_per_microbatch=num_tokens,
        rows=FullRows(length=length, prefix=prefix_tokens, per_group=num_learned),
        label_tokens_per_microbatch=min(num_ends, num_tokens) if rows.reads_ends else num_tokens,
        num_microbatches=config.optim.gradient_accumulation_steps,
        reference_pass_tokens=scored_tokens if has_pass_before else 0,
        scorings=tuple(_row_scorings(config, objective, shape)),
        num_values=1 + loss.with_entropy + loss.with_collisions + has_teacher + len(loss.words),
    )


def _reference_moves(config: TrainingConfig, objective: Objective) -> bool:
    return bool(objective.reference_moves(config).get("update_freq"))


def _row_scorings(
    config: TrainingConfig, objective: Objective, shape: ModelShape
) -> Iterator[Scoring]:
    loss, teacher = objective.bind(config), objective.teacher(config)
    if loss.scores_before_step:
        yield Scoring(shape=shape, num_values=1 + loss.with_entropy)
    if _reference_moves(config, objective):
        yield Scoring(shape=shape, stands_as=REFERENCE, moves=True)
    # A teacher whose top-k distributions are stored is freed before the first step.
    if teacher is not None and teacher.keep is None:
        stands_as = "" if _is_own_teacher(config, teacher.model_name_or_path) else TEACHER
        yield Scoring(
            shape=model_shape(teacher.model_name_or_path), stands_as=stands_as, num_values=0
        )


def _is_own_teacher(config: RunConfig, teacher: str) -> bool:
    """Whether the teacher is the start model of the adapters, judged by its name: the policy with
    its adapters off.
    """
    return config.adapters is not None and teacher == config.model.model_name_or_path


def _rollout_workload(
    config: GRPOConfig, shape: ModelShape, layout: ShardLayout, prefix_tokens: int
) -> Workload:
    loss, fleet, pack_tokens = config.loss, config.fleet, config.max_tokens_per_microbatch

    def on_rank(num_samples: int) -> int:
        """Samples of a mini-batch that the rank with most of them has."""
        return ceil(ceil(num_samples / loss.num_mini_batches) / layout.data_parallel_world_size)

    rows = FullRows(
        length=config.data.max_seq_length,
        prefix=prefix_tokens,
        per_group=config.rollout.num_samples_per_prompt_rollout,
    )
    # Completions of full length are planned for; shorter ones need fewer microbatches.
    num_completions = on_rank(config.num_completions_per_step)
    num_microbatches = ceil(num_completions / max(1, sum(rows.groups_in(pack_tokens)[0])))
    num_tokens = rows.tokens_of(ceil(num_completions / num_microbatches))
    # Conversations lie in microbatches of their own.
    num_of_conversations = ceil(
        on_rank(config.data.sft_rows_per_step) / (pack_tokens // rows.length)
    )
    sync_backend = fleet.weight_sync_backend
    if sync_backend == "auto":
        sync_backend = "ipc" if config.parallel.single_gpu_mode else "nccl"
    return Workload(
        algorithm="grpo",
        tokens_per_microbatch=num_tokens,
        rows=rows,
        label_tokens_per_microbatch=num_tokens,
        num_microbatches=num_microbatches + num_of_conversations,
        num_of_conversations=num_of_conversations,
        pack_tokens=pack_tokens,
        num_updates=loss.num_mini_batches * loss.num_epochs,
        scorings=tuple(_rollout_scorings(config, shape)),
        critic=_critic(config, shape) if config.rollout.has_critic else None,
        temperature=config.rollout.temperature,
        records_entropy=measures_entropy(loss),
        num_values=1 + measures_entropy(loss),
        num_engines=fleet.vllm_num_engines,
        shares_device=config.parallel.single_gpu_mode,
        engine_tensor_degree=fleet.vllm_tensor_parallel_size,
        sync_backend=sync_backend,
        sync_bucket_bytes=fleet.weight_sync_bucket_mib * MIB,
        sync_bytes_per_param=BYTES_OF_DTYPE[config.engine_dtype],
        sends_adapter=config.sent_adapter is not None,
    )


def _rollout_scorings(config: GRPOConfig, shape: ModelShape) -> Iterator[Scoring]:
    loss, teacher = config.loss, config.loss.teacher_model_name_or_path
    num_updates = loss.num_mini_batches * loss.num_epochs
    by_policy = Scoring(shape=shape, num_rounds=loss.num_mini_batches)
    if num_updates > 1:
        yield by_policy
    if loss.beta > 0 and config.adapters:
        yield by_policy  # the reference is the policy with its adapters off
    elif loss.beta > 0:
        yield replace(by_policy, stands_as=REFERENCE, moves=loss.ref_policy_update_freq is not None)
    if teacher is not None and _is_own_teacher(config, teacher):
        yield by_policy
    elif teacher is not None:
        yield replace(by_policy, stands_as=TEACHER, shape=model_shape(teacher))
    if chooses_tokens(loss):
        yield Scoring(shape=shape, num_rounds=num_updates, num_values=1 + measures_entropy(loss))


def _critic(config: GRPOConfig, shape: ModelShape) -> Scoring:
    name = config.critic.critic_model_name_or_path
    whole = adapted(shape if name is None else model_shape(name), None)
    return Scoring(shape=with_scores(whole, 1), num_rounds=config.loss.num_mini_batches)


def is_wrapped(patterns: Iterable[str], layer: int, module: str) -> bool:
    """Whether --activation_checkpointing_modules names this module of a layer; "" is the layer
    itself.
    """
    return names_module(patterns, f"blocks.{layer}.{module}".rstrip("."))
