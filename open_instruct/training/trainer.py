"""OLMo-core's `Trainer` as the record of a run: it takes no steps.

It holds the number of the step, the random state, the callbacks and the checkpoints. Its `fit` is
never called; `loop.py` takes the steps, and calls the callbacks where `fit` would.
"""

from collections.abc import Mapping
from pathlib import Path

from olmo_core.optim import SkipStepOptimizer
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, ConsoleLoggerCallback
from torch.distributed.checkpoint.stateful import Stateful

from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointer
from open_instruct.training.checkpoint_parts import list_checkpoint_parts
from open_instruct.training.optim.optimizers import SkipStepHistory
from open_instruct.training.policy import Policy
from open_instruct.training.rows.loader_state_adapter import LoaderStateAdapter

NEVER = 10**12
# OLMo-core's trainer always has these callbacks. They are not called: the loop writes the
# checkpoints, and the monitor's all-reduce in every step adds nothing to the metrics.
NOT_CALLED = ("checkpointer", "speed_monitor")


def build_trainer(
    learner: Policy,
    place: Stateful,
    *,
    folder: Path,
    num_steps: int,
    callbacks: Mapping[str, Callback],
    critic: Policy | None = None,
) -> Trainer:
    """The trainer of a policy, and of the critic beside it. Collective.

    :param place: the run's place in its data, saved and loaded with every checkpoint.
    :param folder: of the run.
    """
    # OLMo-core would add its own console where it finds none.
    console = ConsoleLoggerCallback(log_interval=NEVER, metrics_log_interval=NEVER)
    histories = skip_step_histories({"": learner, "critic_": critic})
    config = TrainerConfig(
        save_folder=str(folder),
        save_overwrite=True,
        load_strategy=LoadStrategy.never,
        max_duration=Duration.steps(num_steps),
        metrics_collect_interval=1,
        async_bookkeeping=False,  # all ranks must stop after the same step when a signal comes
        no_checkpoints=True,  # the loop writes them
        device=str(learner.device),
        callbacks={
            **callbacks,
            **histories,
            "console_logger": console,
        },
    )
    adapter = LoaderStateAdapter(place, work_dir=folder, dp_process_group=learner.dp_process_group)
    trainer = config.build(learner.backend.train_module, adapter)
    if critic is not None:
        critic.backend.train_module._attach_trainer(trainer)  # for the number of the step
    return trainer


def build_checkpointer(
    folder: Path,
    start_model: str,
    learner: Policy,
    critic: Policy | None,
) -> SafeCheckpointer:
    """What writes the checkpoints of a policy, and of what stands beside it."""
    parts = list_checkpoint_parts(learner, critic)
    return SafeCheckpointer(work_dir=folder, start_model=start_model, parts=parts)


def list_called(trainer: Trainer, callbacks: Mapping[str, Callback]) -> list[Callback]:
    """The trainer's callbacks that the loop calls; `callbacks` were asked for by name."""
    names = [name for name in trainer.callbacks if name in callbacks or name not in NOT_CALLED]
    return [trainer.callbacks[name] for name in names]


def skip_step_histories(policies: Mapping[str, Policy | None]) -> dict[str, Callback]:
    """Callbacks that save what optimizers compare a step with; the keys begin their names."""
    histories: dict[str, Callback] = {}
    for prefix, policy in policies.items():
        if policy is None:
            continue
        optim = getattr(policy.backend.train_module, "optim", None)
        if isinstance(optim, SkipStepOptimizer):
            histories[f"{prefix}skip_step_history"] = SkipStepHistory(optim)
    return histories
