"""The learner of an offline run: its `LearnerState`, and the rows that it takes its steps from."""

from dataclasses import dataclass, replace

import numpy as np

from open_instruct.config.run_sections import RunSection
from open_instruct.config.sections import OptimSection
from open_instruct.config.training import TrainingConfig
from open_instruct.core.text import spell_count
from open_instruct.data.files.array_file import find_cache_folder
from open_instruct.models.lora.adapters import disable_adapters
from open_instruct.objectives.objective import BoundLoss, Objective
from open_instruct.run.cadence import Cadence
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained, fingerprint_start_model
from open_instruct.run.untrained_rows import find_learned_token_ids, find_untrained_rows
from open_instruct.training.learner_state import (
    CompanionModels,
    LearnerState,
    build_learner_state,
)
from open_instruct.training.rows.sample_loader import SampleLoader
from open_instruct.training.rows.training_rows import TrainingRows, read_training_rows
from open_instruct.training.scoring import (
    Heldout,
    Scorer,
    open_reference_cache,
    score_reference,
)
from open_instruct.training.teacher import TeacherComparison


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLearner:
    """One rank's learner of an offline run, before its first step; nothing is set on it later."""

    state: LearnerState
    loader: SampleLoader
    """Loads the rows, with the reference's log-probs if the objective has them scored once."""

    heldout: Heldout | None


def build_offline_learner(
    config: TrainingConfig,
    objective: Objective,
    pretrained: Pretrained,
    run: Run,
) -> OfflineLearner:
    """Read the rows, build the models, and score the rows under the frozen start model. Collective.

    :raises InputError: a row, a model or a checkpoint of the run will not do; most is found before
        a weight is read.
    """
    loss = bind_loss(objective, config, pretrained)  # refuses words that are no single token
    start_model = fingerprint_start_model(pretrained, run)
    companions = open_companions(config, objective, pretrained, run)
    rows = read_training_rows(config, objective, pretrained, run)
    warn_of_rows(rows, config, objective, pretrained, run)
    state = build_learner_state(
        pretrained,
        run=run,
        config=config,
        loss=loss,
        cadence=plan_cadence(
            config.optim,
            config.run,
            eval_steps=config.data.eval_steps,
            num_steps_per_epoch=rows.num_steps_per_epoch,
        ),
        start_model=start_model,
        companions=companions,
        rows=rows,
    )
    assert state.rows is not None
    rows = state.rows
    scorer = Scorer(
        policy=state.policy,
        shape=rows.shape,
        run=run,
        config=config,
    )
    frozen = FrozenScores()
    if objective.needs_reference(config):
        moves = bool(companions.reference_moves)
        frozen = score_frozen(rows, objective, pretrained, scorer=scorer, reference_moves=moves)
    loader = SampleLoader(
        rows.dataset,
        rows.samples,
        reference_logps_ND=frozen.training_ND,
        values_class=state.policy.loss.values_class,
        shape=rows.shape,
        seed=config.optim.seed,
        dp_group=state.policy.dp_process_group,
    )
    heldout: Heldout | None = None
    if rows.heldout is not None:
        heldout = Heldout(rows.heldout, frozen.heldout_ND, scorer, objective)
    return OfflineLearner(state=state, loader=loader, heldout=heldout)


def open_companions(
    config: TrainingConfig,
    objective: Objective,
    pretrained: Pretrained,
    run: Run,
) -> CompanionModels:
    """The models beside the policy of an offline run, as its objective asks for them.

    :raises InputError: a teacher cannot be opened, or its vocabulary is not the student's.
    """
    comparison: TeacherComparison | None = None
    teacher = objective.teacher(config)
    if teacher is not None:
        comparison = TeacherComparison.open(teacher, pretrained, config=config, layout=run.layout)
    moves = objective.reference_moves(config)
    if not moves.get("update_freq"):
        return CompanionModels(comparison=comparison)
    return CompanionModels(comparison=comparison, reference=pretrained, reference_moves=moves)


def bind_loss(objective: Objective, config: TrainingConfig, pretrained: Pretrained) -> BoundLoss:
    loss = objective.bind(config).with_ids(pretrained.tokenizer)
    if pretrained.adapter is None:
        return loss
    # The reference is the model without the adapter, so the first loss may be any.
    return replace(loss, checks_first_loss=False)


def plan_cadence(
    optim: OptimSection,
    run: RunSection,
    *,
    eval_steps: int | None,
    num_steps_per_epoch: int,
) -> Cadence:
    """When a run saves and evaluates; rows come again where it has more steps than epochs do."""
    return Cadence(
        num_steps=optim.max_train_steps or optim.num_epochs * num_steps_per_epoch,
        save_every=run.checkpointing_steps or num_steps_per_epoch,
        save_ephemeral_every=run.ephemeral_save_interval,
        evaluate_every=eval_steps or None,
        saves_best=run.keep_best is not None,
    )


def warn_of_rows(
    rows: TrainingRows,
    config: TrainingConfig,
    objective: Objective,
    pretrained: Pretrained,
    run: Run,
) -> None:
    num_ranks = run.layout.data_parallel_world_size
    num_rows_per_step = rows.shape.max_samples_per_rank * num_ranks
    row_warnings = objective.check_rows(rows.dataset, num_rows_per_step, config)
    for warning in (*pretrained.warnings, *row_warnings):
        run.console.warn(warning)
    if config.adapters is not None:
        row_warning = find_untrained_rows(pretrained, find_learned_token_ids(rows.dataset))
        if row_warning:
            run.console.warn(row_warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenScores:
    """Log-probs under the frozen start model, float32 (N, D): rows, documents of a row."""

    training_ND: np.ndarray | None = None
    """The frozen scores; None where the reference moves, and so is asked in every step."""

    heldout_ND: np.ndarray | None = None


def score_frozen(
    rows: TrainingRows,
    objective: Objective,
    pretrained: Pretrained,
    *,
    scorer: Scorer,
    reference_moves: bool,
) -> FrozenScores:
    """Score all rows under the policy, which has the start model's weights yet. Collective.

    What a cache has of them is not computed.
    """
    config = scorer.config
    policy = scorer.policy
    folder = find_cache_folder(config.data.cache_dir) / "reference_logprobs"
    if policy.loss.ld_alpha is not None:
        folder /= f"ld-{policy.loss.ld_alpha}"
    cache = open_reference_cache(
        folder, pretrained, precision=config.reference_precision, shape=rows.shape
    )
    training_ND: np.ndarray | None = None
    heldout_ND: np.ndarray | None = None
    with disable_adapters(policy.model):
        if not reference_moves:
            title = "reference log-probs"
            training_ND = score_reference(scorer, rows.dataset, cache=cache, title=title)
        if rows.heldout is not None:
            title = "held-out reference log-probs"
            heldout_ND = score_reference(scorer, rows.heldout, cache=cache, title=title)
    if objective.only_scores(config):
        num_rows = spell_count(len(cache), "row")
        scorer.run.console.say(f"reference log-probs of {num_rows}: {cache.path}")
    return FrozenScores(training_ND=training_ND, heldout_ND=heldout_ND)
