"""The process of a learner or an engine: it sets its environment, then constructs that, then calls its methods."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.cluster.process_environment import take_environment
from open_instruct.cluster.watchdog import ACTOR_NAME
from open_instruct.parallel.peers import doing


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A process and its place: `gpu_ids` are given by Ray, `num_cores` counts those of its machine."""

    pid: int
    node_id: str
    address: str
    gpu_ids: tuple[str, ...]
    num_cores: int


class ActorHost:
    """The Ray actor of a learner or an engine.

    Ray runs the methods of a learner's one after the other, in the order of the driver's calls, those of an engine's
    side by side.
    """

    def __init__(self) -> None:
        self._held: Any = None

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

    def set_environment(self, name: str, environment: Mapping[str, str], *, meeting_address: str) -> None:
        """Set environment variables, and write `name` into the log, which is kept under it, such as "learner-0".

        This comes in a call before `construct`, since Ray imports the class, and so torch, before it enters that
        method.
        """
        for stream in (sys.stdout, sys.stderr):
            print(f"{ACTOR_NAME}{name}", file=stream, flush=True)
        take_environment(environment, meeting_address=meeting_address)

    def construct(self, what: type, arguments: Mapping[str, Any], environment_set: None = None) -> None:
        """Construct the learner or the engine; where calls run side by side, `environment_set` has this one wait."""
        self._held = what(**arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        doing(f"busy with {method}")
        try:
            return getattr(self._held, method)(*args, **kwargs)
        finally:
            doing("waiting for the driver")
