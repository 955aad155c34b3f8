"""The process of a learner: it sets its environment, then constructs the learner, then calls its methods."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.cluster.process_environment import go_by, take_environment
from open_instruct.parallel.peers import doing


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The process of a learner and its place: `gpu_ids` are given by Ray, `num_cores` counts those of its machine."""

    pid: int
    node_id: str
    address: str
    gpu_ids: tuple[str, ...]
    num_cores: int


class LearnerHost:
    """The Ray actor of a learner. Ray runs its methods one after the other, in the order of the driver's calls."""

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
        """Set environment variables.

        This comes in a call before `construct`, since Ray imports the learner's class, and so torch, before it enters
        that method.
        """
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
