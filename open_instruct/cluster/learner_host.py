"""The process around a learner: it takes its environment first, then constructs the learner and calls it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.cluster.process_environment import go_by, take_environment
from open_instruct.parallel.peers import doing


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Where a learner's process found itself."""

    pid: int
    node_id: str
    address: str
    gpu_ids: tuple[str, ...]
    num_cores: int


class LearnerHost:
    """What Ray runs. Methods are called one after the other, in the order in which the driver asked."""

    def __init__(self) -> None:
        self._learner: Any = None

    def facts(self) -> HostFacts:
        import ray

        context = ray.get_runtime_context()
        return HostFacts(
            pid=os.getpid(),
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            gpu_ids=tuple(context.get_accelerator_ids()["GPU"]),
            num_cores=os.cpu_count() or 1,
        )

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """A call of its own: Ray imports the learner's class, and so torch, before it enters `construct`."""
        go_by(f"learner-{environment['RANK']}")
        take_environment(environment, meeting_address=environment["MASTER_ADDR"])

    def construct(self, learner_class: type, arguments: Mapping[str, Any]) -> None:
        self._learner = learner_class(**arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        doing(f"busy with {method}")
        try:
            return getattr(self._learner, method)(*args, **kwargs)
        finally:
            doing("waiting for the driver")


def on_their_nodes(function: Callable[[int], Any], facts: Sequence[HostFacts], *, timeout_s: float) -> list[Any]:
    """`function(pid)` for each process on the node it runs on; None where the node does not answer in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote(function)
    away = {
        fact: remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(fact.node_id, soft=False)
        ).remote(fact.pid)
        for fact in facts
        if fact.node_id != here
    }
    if away:
        ray.wait(list(away.values()), num_returns=len(away), timeout=timeout_s)

    def answer(fact: HostFacts) -> Any:
        if fact not in away:
            return function(fact.pid)
        with contextlib.suppress(ray.exceptions.RayError):  # the node is gone, or has not answered yet
            return ray.get(away[fact], timeout=0)
        return None

    return [answer(fact) for fact in facts]
