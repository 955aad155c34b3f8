"""Builds the shape of the model that a run trains, and the work of a rank, from the run's flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from open_instruct.batching.prefixes import FullRows, count_saved_tokens
from open_instruct.config.fleet_sections import FleetSection, LearnerParallelSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.lora import MODULES_OF_TARGETS, LoRASection
from open_instruct.config.policy_sections import CriticSection, PolicyLossSection
from open_instruct.config.sections import ModelSection
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.hf.head_kinds import HEAD_SIZES, check_head
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.policy_gradient import chooses_tokens, measures_entropy
from open_instruct.objectives.registry import list_objectives, load_objective
from open_instruct.parallel.engines import count_engines
from open_instruct.planning.subject.model import Adapters, ModelShape
from open_instruct.planning.subject.read_shape import BYTES_OF_DTYPE, model_shape
from open_instruct.planning.subject.workload import MIB, Scoring, Workload

RunConfig = TrainingConfig | GRPOConfig
REFERENCE = "reference policy"
TEACHER = "teacher"


def find_objective(config: RunConfig) -> Objective:
    """The registered objective of a config.

    Raises:
        InputError: there is none.
    """
    by_class: dict[type, Objective] = {}
    for name in list_objectives():
        objective = load_objective(name)
        by_class[objective.config_class] = objective
    # The most derived class first, as a config class may inherit another objective's.
    for kind in type(config).__mro__:
        if kind in by_class:
            return by_class[kind]
    flags = type(config).__name__
    raise InputError(
        f"no registered objective has the flags of {flags}, so it cannot be planned",
        kind="own_code",
    )


def build_workload(
    config: RunConfig,
    shape: ModelShape,
    layout: ShardLayout,
    *,
    prompt_tokens: int = 0,
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
        workload = _row_workload(config, find_objective(config), shape, prefix_tokens)
    workload = replace(
        workload,
        reduces_last=config.parallel.gradient_reduction == "last",
        gathered_ahead=config.parallel.fsdp_prefetch_factor,
        param_dtype=config.model.param_dtype,
        multiplies_in_float8=config.model.float8_linears != "off",
        optimizer=config.optim.optimizer,
        activation_memory_budget=config.memory.activation_memory_budget,
        export_bytes_per_param=BYTES_OF_DTYPE.get(
            config.run.export_dtype, shape.checkpoint_bytes_per_param
        ),
    )
    return _with_checkpointing(workload, config.memory)


def _with_checkpointing(workload: Workload, memory: MemorySection) -> Workload:
    """The workload with the checkpointing of the flags; with auto, none has been chosen yet."""
    mode = memory.activation_checkpointing
    if mode == "auto":
        return workload
    if mode != "selected_modules":
        return replace(workload, checkpointing=mode)
    modules = tuple(memory.activation_checkpointing_modules)
    return replace(workload, checkpointing=mode, checkpointing_modules=modules)


def build_shape(config: RunConfig, model: str) -> ModelShape:
    """The start model with the head and the adapters that the run gives it; see `model_shape`.

    Raises:
        InputError: also where a trained model of the family could not be opened with that head.
    """
    shape = with_adapters(model_shape(model), config.adapters)
    head = find_objective(config).choose_head(config)
    check_head(shape.family, head)
    if head == "vocabulary":
        return shape
    return with_scores(shape, HEAD_SIZES[head])


def with_scores(shape: ModelShape, num: int) -> ModelShape:
    """The shape of the model with a head of `num` rows in place of the vocabulary's."""
    return replace(shape, scores=num, is_tied=False)


def with_adapters(shape: ModelShape, lora: LoRASection | None) -> ModelShape:
    """The shape of the model with the adapters of a run, or with none."""
    if lora is None and shape.adapters is None:
        return shape
    if lora is None:
        return replace(shape, adapters=None)
    modules = tuple(MODULES_OF_TARGETS[target] for target in lora.targets)
    adapters = Adapters(
        rank=lora.lora_r,
        modules=modules,
        drops=lora.lora_dropout > 0,
        in_4_bits=lora.use_qlora,
    )
    return replace(shape, adapters=adapters)


def _row_workload(
    config: TrainingConfig,
    objective: Objective,
    shape: ModelShape,
    prefix_tokens: int,
) -> Workload:
    rows = objective.choose_rows(config)
    num_documents = rows.documents_per_row
    num_learned = objective.documents_learned or num_documents
    num_rows = config.optim.per_device_train_batch_size
    length = config.data.max_seq_length
    num_tokens = num_rows * (num_learned * length - count_saved_tokens(prefix_tokens, num_learned))

    num_labels = num_tokens
    if rows.reads_ends:
        num_labels = min(num_rows * num_documents * rows.ends_per_document, num_tokens)

    scored_tokens = 0
    if objective.needs_reference(config) and not _reference_moves(config, objective):
        num_saved = count_saved_tokens(prefix_tokens, num_documents)
        scored_tokens = num_rows * (num_documents * length - num_saved)

    loss = objective.bind(config)
    has_teacher = objective.teacher(config) is not None
    return Workload(
        algorithm=objective.name,
        tokens_per_microbatch=num_tokens,
        rows=FullRows(length=length, prefix=prefix_tokens, per_group=num_learned),
        label_tokens_per_microbatch=num_labels,
        num_microbatches=config.optim.gradient_accumulation_steps,
        reference_pass_tokens=scored_tokens,
        scorings=tuple(_row_scorings(config, objective, shape)),
        num_values=1 + loss.with_entropy + loss.with_collisions + has_teacher + len(loss.words),
    )


def _reference_moves(config: TrainingConfig, objective: Objective) -> bool:
    return bool(objective.reference_moves(config).get("update_freq"))


def _row_scorings(
    config: TrainingConfig, objective: Objective, shape: ModelShape
) -> Iterator[Scoring]:
    loss = objective.bind(config)
    teacher = objective.teacher(config)
    if loss.scores_before_step:
        yield Scoring(shape=shape, num_values=1 + loss.with_entropy)
    if _reference_moves(config, objective):
        yield Scoring(shape=shape, stands_as=REFERENCE, moves=True)
    # A teacher whose top-k distributions are stored is freed before the first step.
    if teacher is not None and teacher.keep is None:
        name = teacher.model_name_or_path
        is_policy = _is_start_model(name, config.model, config.adapters)
        stands_as = "" if is_policy else TEACHER
        yield Scoring(shape=model_shape(name), stands_as=stands_as, num_values=0)


def _is_start_model(teacher: str, model: ModelSection, adapters: LoRASection | None) -> bool:
    """Whether the teacher is the policy with its adapters off, judged by its name."""
    return adapters is not None and teacher == model.model_name_or_path


def _rollout_workload(
    config: GRPOConfig,
    shape: ModelShape,
    layout: ShardLayout,
    prefix_tokens: int,
) -> Workload:
    loss = config.loss
    fleet = config.fleet
    pack_tokens = config.max_tokens_per_microbatch

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
    groups, _ = rows.fill_groups(pack_tokens)
    num_microbatches = ceil(num_completions / max(1, sum(groups)))
    num_tokens = rows.count_tokens(ceil(num_completions / num_microbatches))
    # Conversations lie in microbatches of their own.
    num_of_conversations = ceil(
        on_rank(config.data.sft_rows_per_step) / (pack_tokens // rows.length)
    )
    sync_backend: str = fleet.weight_sync_backend
    if sync_backend == "auto":
        sync_backend = _choose_sync_backend(fleet, config.parallel)
    critic = None
    if config.rollout.has_critic:
        critic = _critic(config.critic, loss, shape)
    scorings = _rollout_scorings(loss, config.model, config.adapters, shape)
    return Workload(
        algorithm="grpo",
        tokens_per_microbatch=num_tokens,
        rows=rows,
        label_tokens_per_microbatch=num_tokens,
        num_microbatches=num_microbatches + num_of_conversations,
        num_of_conversations=num_of_conversations,
        pack_tokens=pack_tokens,
        num_updates=loss.num_mini_batches * loss.num_epochs,
        scorings=tuple(scorings),
        critic=critic,
        temperature=config.rollout.temperature,
        records_entropy=measures_entropy(loss),
        num_values=1 + measures_entropy(loss),
        num_engines=count_engines(fleet, sum(config.parallel.num_learners_per_node)),
        shares_device=config.parallel.single_gpu_mode,
        engine_tensor_degree=fleet.vllm_tensor_parallel_size,
        sync_backend=sync_backend,
        sync_bucket_bytes=fleet.weight_sync_bucket_mib * MIB,
        sync_bytes_per_param=BYTES_OF_DTYPE[config.engine_dtype],
        sends_adapter=config.sent_adapter is not None,
    )


def _choose_sync_backend(fleet: FleetSection, parallel: LearnerParallelSection) -> str:
    """What `--weight_sync_backend auto` is on GPUs, as far as flags alone can tell."""
    if fleet.placement == "mixed":
        return "shm" if len(parallel.num_learners_per_node) == 1 else "gloo"
    is_on_device = parallel.single_gpu_mode or fleet.takes_turns
    return "ipc" if is_on_device else "nccl"


def _rollout_scorings(
    loss: PolicyLossSection,
    model: ModelSection,
    adapters: LoRASection | None,
    shape: ModelShape,
) -> Iterator[Scoring]:
    teacher = loss.teacher_model_name_or_path
    num_updates = loss.num_mini_batches * loss.num_epochs
    by_policy = Scoring(shape=shape, num_rounds=loss.num_mini_batches)
    if num_updates > 1:
        yield by_policy
    if loss.beta > 0 and adapters is not None:
        yield by_policy  # the reference is the policy with its adapters off
    elif loss.beta > 0:
        yield replace(by_policy, stands_as=REFERENCE, moves=loss.ref_policy_update_freq is not None)
    if teacher is not None and _is_start_model(teacher, model, adapters):
        yield by_policy
    elif teacher is not None:
        yield replace(by_policy, stands_as=TEACHER, shape=model_shape(teacher))
    if chooses_tokens(loss):
        yield Scoring(shape=shape, num_rounds=num_updates, num_values=1 + measures_entropy(loss))


def _critic(critic: CriticSection, loss: PolicyLossSection, shape: ModelShape) -> Scoring:
    """The critic's passes before an update; it starts from the policy's model, or from its own."""
    if critic.critic_model_name_or_path is not None:
        shape = model_shape(critic.critic_model_name_or_path)
    whole = with_adapters(shape, None)
    return Scoring(shape=with_scores(whole, 1), num_rounds=loss.num_mini_batches)
