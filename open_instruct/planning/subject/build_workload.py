"""Builds the shape of the model that a run trains, and the work of a rank, from the run's flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from open_instruct.batching.prefixes import FullRows, saved_tokens
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.lora import MODULES_OF_TARGETS, LoRASection
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.hf.head_kinds import HEAD_SIZES, check_head
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.policy_gradient import chooses_tokens, measures_entropy
from open_instruct.objectives.registry import objective_named, objective_names
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


def build_workload(
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
        workload = _row_workload(config, find_objective(config), shape, prefix_tokens)
    memory = config.memory
    checkpointing = memory.activation_checkpointing
    modules = memory.activation_checkpointing_modules if checkpointing == "selected_modules" else ()
    return replace(
        workload,
        reduces_last=config.parallel.gradient_reduction == "last",
        gathered_ahead=config.parallel.fsdp_prefetch_factor,
        param_dtype=config.model.param_dtype,
        multiplies_in_float8=config.model.float8_linears != "off",
        optimizer=config.optim.optimizer,
        checkpointing="none" if checkpointing == "auto" else checkpointing,
        checkpointing_modules=tuple(modules),
        activation_memory_budget=memory.activation_memory_budget,
        export_bytes_per_param=BYTES_OF_DTYPE.get(
            config.run.export_dtype, shape.checkpoint_bytes_per_param
        ),
    )


def build_shape(config: RunConfig, model: str) -> ModelShape:
    """The start model with the head and the adapters that the run gives it; see `model_shape`.

    Raises:
        InputError: also where a trained model of the family could not be opened with that head.
    """
    shape = with_adapters(model_shape(model), config.adapters)
    head = find_objective(config).choose_head(config)
    check_head(shape.family, head)
    return shape if head == "vocabulary" else with_scores(shape, HEAD_SIZES[head])


def with_scores(shape: ModelShape, num: int) -> ModelShape:
    """The same model with a head of so many rows in place of the vocabulary's."""
    return replace(shape, scores=num, is_tied=False)


def with_adapters(shape: ModelShape, lora: LoRASection | None) -> ModelShape:
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
    whole = with_adapters(shape if name is None else model_shape(name), None)
    return Scoring(shape=with_scores(whole, 1), num_rounds=config.loss.num_mini_batches)
