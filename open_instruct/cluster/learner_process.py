"""What the driver asks of a learner's process, so that a call across processes is checked like one within."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from open_instruct.packing.rollouts import RankStep

P = ParamSpec("P")
R = TypeVar("R")


class LearnerProcess(Protocol):
    """One rank of the learners, as `PolicyTrainerOLMoCoreProcess` is; every method is called on all ranks at once.

    A call names its method, and which class answers is the run's choice:
    `learners.start(LearnerProcess.broadcast_to_vllm, 3).result(timeout_s)`.
    """

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""

    def resume(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Stand where the newest whole checkpoint stands.

        Returns what `save_state` was given for it, None at the start; and what people should be warned of.
        """

    def save_state(self, drivers_state: dict[str, Any], *, waits: bool) -> None:
        """Write a checkpoint of this step, with the driver's own state in it; where it `waits`, it is there then."""

    def save_model(self) -> None:
        """Export the trained model."""

    def open_weight_channel(self, num_receivers: int) -> dict[str, Any]:
        """What the engines need to connect; see `WeightSender.open`."""

    def join_weight_channel(self) -> None:
        """Wait until every engine has connected."""

    def broadcast_to_vllm(self, version: int) -> None:
        """Stream the policy from its shards to the engines."""


LearnerMethod = Callable[Concatenate[LearnerProcess, P], R]
