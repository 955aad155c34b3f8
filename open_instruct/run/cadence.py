"""The steps of a run after which it saves a checkpoint, evaluates on held-out data, or compares processes."""

from __future__ import annotations

from dataclasses import dataclass

from open_instruct.config.grpo import GRPOConfig
from open_instruct.run.alarms import WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The steps after which a run saves and evaluates. Steps count from 1.

    Example: `Cadence(num_steps=10, save_every=4, evaluate_every=5)` saves after steps 4, 8 and 10 and evaluates after
    steps 5 and 10.
    """

    num_steps: int
    save_every: int
    """Steps between checkpoints that last."""
    save_ephemeral_every: int | None = None
    """Steps between checkpoints that are removed once there is a newer one; None for no such checkpoints."""
    evaluate_every: int | None = None
    """Steps between evaluations, of which one is after the last step; 0 for that one alone, None for no evaluation."""

    @property
    def lasting_interval(self) -> int:
        """A checkpoint lasts if its step is a multiple of this."""
        return self.save_every if self.save_ephemeral_every else 1

    def is_last(self, step: int) -> bool:
        return step == self.num_steps

    def saves_after(self, step: int) -> bool:
        return (
            self.is_last(step) or _is_multiple(step, self.save_every) or _is_multiple(step, self.save_ephemeral_every)
        )

    def evaluates_after(self, step: int) -> bool:
        return self.evaluate_every is not None and (self.is_last(step) or _is_multiple(step, self.evaluate_every))

    def compares_speed_after(self, step: int) -> bool:
        return step % WINDOW == 0


def cadence_of(config: GRPOConfig) -> Cadence:
    """The cadence of a run of GRPO."""
    evaluates = bool(config.data.dataset_mixer_eval_list)
    return Cadence(
        num_steps=config.num_steps,
        save_every=config.run.checkpointing_steps,
        save_ephemeral_every=config.run.ephemeral_save_interval,
        evaluate_every=config.evaluation.local_eval_every if evaluates else None,
    )


def _is_multiple(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
