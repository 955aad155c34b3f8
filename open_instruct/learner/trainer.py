"""OLMo-core's trainer, set up for a run directory and resumed from what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, ConsoleLoggerCallback

from open_instruct.checkpoints.resume import RunCheckpointer, SkipStepHistory, resume
from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointerConfig
from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.training import LearnerConfig
from open_instruct.learner.train_module import ObjectiveTrainModule
from open_instruct.parallel.peers import doing
from open_instruct.run.metrics_log import MetricsFile, MetricsLog
from open_instruct.run.opened import Run
from open_instruct.run.trackers import build_trackers

NEVER = 10**12


class EndOfStep(Callback):
    """Tells the policy that a step of one update is over, before a checkpoint of it is written."""

    def post_train_batch(self) -> None:
        assert isinstance(self.trainer.train_module, ObjectiveTrainModule)
        self.trainer.train_module.end_step()


def trainer_of(
    policy: ObjectiveTrainModule,
    loader: DataLoaderBase,
    *,
    folder: Path,
    start_model: str,
    num_steps: int,
    callbacks: Mapping[str, Callback],
) -> Trainer:
    """OLMo-core's trainer of `num_steps` steps, with our checkpoints in `folder`; `resume` is the caller's to call.

    Bookkeeping is synchronous: ranks must agree at the end of which step a signal stops them, and the
    background threads of the asynchronous kind let one rank leave the loop a step before its peers.

    :param start_model: fingerprint of what the policy began as, see `start_model_of`.
    """
    return TrainerConfig(
        save_folder=str(folder),
        save_overwrite=True,
        load_strategy=LoadStrategy.never,
        checkpointer=SafeCheckpointerConfig(start_model=start_model),
        max_duration=Duration.steps(num_steps),
        metrics_collect_interval=1,
        cancel_check_interval=1,
        async_bookkeeping=False,
        device=str(policy.device),
        callbacks={
            **callbacks,
            "skip_step_history": SkipStepHistory(),
            # OLMo-core would add its own console where it finds none.
            "console_logger": ConsoleLoggerCallback(log_interval=NEVER, metrics_log_interval=NEVER),
        },
    ).build(policy, loader)


def build_trainer(
    policy: ObjectiveTrainModule,
    loader: DataLoaderBase,
    *,
    config: LearnerConfig,
    run: Run,
    start_model: str,
    num_steps: int,
) -> Trainer:
    """A trainer that stands where the newest whole checkpoint of the run directory left off.

    :raises RunError: if there are checkpoints, but none can be read.
    """
    metrics_log = MetricsLog()
    if run.process.rank == 0:
        trackers = build_trackers(config.logging, folder=run.directory.path, config=as_flat_dict(config))
        metrics_log = MetricsLog(file=MetricsFile(run.directory.metrics), console=run.console, trackers=trackers)
    checkpointer = RunCheckpointer(
        save_interval=config.run.checkpointing_steps,
        max_checkpoints=config.run.keep_last_n_checkpoints or None,
        save_async=False,
        pre_train_checkpoint=False,
    )
    trainer = trainer_of(
        policy,
        loader,
        folder=run.directory.path,
        start_model=start_model,
        num_steps=num_steps,
        callbacks={"metrics": metrics_log, "checkpointer": checkpointer, "end_of_step": EndOfStep()},
    )
    doing("loading the checkpoint")
    step = resume(trainer, warn=run.console.warn)
    if step is not None:
        run.console.say(f"resuming after step {step} of {num_steps}")
    return trainer
