"""The methods that the driver calls in a learner's process, so that mypy checks these calls."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from open_instruct.packing.rollouts import RankStep

P = ParamSpec("P")
R = TypeVar("R")


class LearnerProcess(Protocol):
    """One rank of the learners, such as `PolicyTrainerOLMoCoreProcess`; every method is called on all ranks at once.

    A call names the method of this class: `learners.start(LearnerProcess.broadcast_to_vllm, 3).result(timeout_s)`.
    """

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""

    def resume(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Load the newest complete checkpoint, if there is one.

        Returns:
            The driver's state that `save_state` got for it, or None; and warnings for people.
        """

    def save_state(self, drivers_state: dict[str, Any], *, waits: bool) -> None:
        """Write a checkpoint of this step, with the state of the driver; return once it is complete if it `waits`."""

    def save_model(self) -> None:
        """Export the trained model."""

    def open_weight_channel(self, num_receivers: int) -> dict[str, Any]:
        """Offer a channel for weights; returns what the engines need to connect, see `WeightSender.open`."""

    def join_weight_channel(self) -> None:
        """Wait until every engine has connected."""

    def broadcast_to_vllm(self, version: int) -> None:
        """Stream the policy from its shards to the engines."""


LearnerMethod = Callable[Concatenate[LearnerProcess, P], R]
