"""The walk of an offline run whose flags are known to be good: build, score, fit, export."""

from collections.abc import Mapping
from typing import Any

from olmo_core.train.callbacks import Callback

from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError
from open_instruct.core.metrics import HELD_OUT_PREFIX, metric_entry
from open_instruct.core.text import join_choices
from open_instruct.objectives.objective import Evaluation, Objective
from open_instruct.run.cadence import Cadence, describe_stop
from open_instruct.run.metrics_log import log_steps
from open_instruct.run.opening import Run, open_run, plan_run
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.training.best_step_watch import BestStepWatch, find_idle_watch
from open_instruct.training.export import export_policy
from open_instruct.training.loop import Loop
from open_instruct.training.offline_learner import OfflineLearner, build_offline_learner
from open_instruct.training.rows.datasets import load_datasets
from open_instruct.training.scoring import Heldout


def train(
    config: TrainingConfig, *, objective: Objective, callbacks: Mapping[str, Callback] | None = None
) -> int:
    """Train and export, as every rank does; returns the exit code.

    :param callbacks: OLMo-core's, by name.
    """
    if config.data.has_held_out_rows and not objective.scores_heldout_rows:
        flag = "--eval_split"
        if config.data.eval_mixer_list:
            flag = "--eval_mixer_list"
        raise InputError(
            f"{flag}: {objective.name} has no `evaluate`; write one, or leave the flag out",
            kind="own_code",
        )
    with open_run(config, objective.name) as run:
        pretrained = open_start_model(config, objective, run)
        exported = objective.export_fields(config, pretrained.tokenizer, pretrained.hf_config)
        if config.data.cache_dataset_only:
            load_datasets(objective, config, pretrained.tokenizer, run.console)
            return 0
        config = plan_run(config, run, pretrained.folder)
        learner = build_offline_learner(config, objective, pretrained, run)
        if objective.only_scores(config):
            return 0
        return fit_and_export(learner, pretrained, config, objective, exported, callbacks)


def fit_and_export(
    learner: OfflineLearner,
    pretrained: Pretrained,
    config: TrainingConfig,
    objective: Objective,
    exported: Mapping[str, Any],
    callbacks: Mapping[str, Callback] | None,
) -> int:
    """Take the steps that are left, and export the last or the best; returns the exit code.

    :param exported: what the objective adds to the exported config.json.
    """
    state = learner.state
    run = state.run
    heldout = learner.heldout
    loop = resume_loop(learner, callbacks)
    if heldout is not None and (loop.step == 0 or state.cadence.evaluates_after(loop.step)):
        check_metric(config.run.keep_best, heldout.evaluate(loop.step))
    best = watch_best_step(config.run.keep_best, run, state.cadence, until=loop.step)
    num_steps = state.cadence.num_steps
    with log_steps(run, config, first_step=loop.step, num_steps=num_steps) as on_step:
        signal = loop.fit(learner.loader, on_step=on_step, heldout=heldout, best=best)
    if signal is not None:
        message, code = describe_stop(signal, step=loop.step, folder=run.directory.path)
        run.console.say(message)
        return code
    more_config = dict(exported)
    if heldout is not None:
        more_config |= heldout.evaluate(loop.step).exported
    if best is not None:
        more_config |= load_best(loop, best, heldout, run)
    export_policy(
        state.policy,
        pretrained,
        run=run,
        export_dtype=config.run.export_dtype,
        adapters=config.adapters,
        trained_by=objective.name,
        best=None if best is None else best.best,
        more_config=more_config,
        for_olmo_core=config.run.export_olmo_core,
    )
    return 0


def take_first_loss(config: TrainingConfig, *, objective: Objective) -> float:
    """The loss of the first microbatch under the start model, of a run that ends there. Collective.

    What the run writes is in the folder of `config`, which the caller takes away.
    """
    with open_run(config, objective.name) as run:
        pretrained = open_start_model(config, objective, run)
        objective.export_fields(config, pretrained.tokenizer, pretrained.hf_config)
        learner = build_offline_learner(config, objective, pretrained, run)
        policy = learner.state.policy
        step = policy.prepare_step(next(learner.loader.rest_of_epoch()))
        policy.backend.set_mode("eval")
        loss = policy.microbatch_loss(step.microbatches[0], step.counts).loss
        return float(loss.detach())


def open_start_model(config: TrainingConfig, objective: Objective, run: Run) -> Pretrained:
    head = objective.choose_head(config)
    return open_pretrained(config, run.directory.hf_model, layout=run.layout, head=head)


def resume_loop(learner: OfflineLearner, callbacks: Mapping[str, Callback] | None) -> Loop:
    """The loop, which stands where the newest checkpoint stands. Collective."""
    run = learner.state.run
    loop = learner.state.build_loop(learner.loader, callbacks=callbacks)
    if loop.resume(warn=run.console.warn):
        num_steps = learner.state.cadence.num_steps
        run.console.say(f"resuming after step {loop.step} of {num_steps}")
    return loop


def check_metric(keep_best: str | None, evaluation: Evaluation) -> None:
    """:raises InputError: `--keep_best` names a number of held-out rows that no evaluation has."""
    metric = keep_best or ""
    if not metric.startswith(HELD_OUT_PREFIX) or metric in evaluation.row:
        return
    known_metrics = [name for name in evaluation.row if metric_entry(name).better is not None]
    remedy = "give a metric of training, such as loss"
    if known_metrics:
        remedy = f"give {join_choices(known_metrics)}"
    raise InputError(
        f"--keep_best {metric}: an evaluation of this run has no such number; {remedy}",
        kind="bad_value",
        flag="keep_best",
    )


def watch_best_step(
    keep_best: str | None,
    run: Run,
    cadence: Cadence,
    *,
    until: int,
) -> BestStepWatch | None:
    """What follows the best step under `--keep_best`; None without it. Collective."""
    if keep_best is None:
        return None
    warning = find_idle_watch(keep_best, cadence, flag="--eval_steps")
    if warning:
        run.console.warn(warning)
    return BestStepWatch(keep_best, run.directory, until=until)


def load_best(
    loop: Loop,
    watch: BestStepWatch,
    heldout: Heldout | None,
    run: Run,
) -> Mapping[str, Any]:
    """Load the best step; returns what its held-out scores add to its config.json. Collective."""
    best = watch.best
    if best is None:
        run.console.warn(watch.no_best_warning)
        return {}
    if best.step == loop.step:
        return {}
    loop.load_step(best.step)
    if heldout is None:
        return {}
    return heldout.score_again(best.step).exported
