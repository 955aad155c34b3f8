"""The process of a learner or an engine: it sets variables, constructs the object, calls methods.

Environment variables are set before torch or vLLM is imported there.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from open_instruct.cluster.addresses import find_address_towards, find_interface
from open_instruct.cluster.watchdog import ACTOR_NAME
from open_instruct.core.errors import InputError
from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE
from open_instruct.parallel.status import this_process

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# A node's own values of these stay; torch's allocator has two names for its setting.
NODE_SETTINGS = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", ALLOCATOR}
SAME_AS = {ALLOCATOR: "PYTORCH_ALLOC_CONF"}
SEGMENTS_GROW = "expandable_segments:True"
SEGMENTS_STAY = "expandable_segments:False"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The process of an actor, and what it has of its machine."""

    pid: int
    address: str
    gpu_ids: tuple[str, ...]  # as Ray assigns them
    num_cores: int  # of its machine


class ActorHost:
    """The Ray actor of a learner or an engine.

    Ray runs a learner's methods one after the other, in the order of the driver's calls, and an
    engine's at the same time.
    """

    _object: Any = None

    def facts(self) -> HostFacts:
        import ray

        return HostFacts(
            pid=os.getpid(),
            address=ray.util.get_node_ip_address(),
            gpu_ids=tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"]),
            num_cores=os.cpu_count() or 1,
        )

    def set_environment(
        self, name: str, environment: Mapping[str, str], *, meeting_address: str
    ) -> None:
        """Set environment variables, and name the log, such as "learner-0".

        This is a call before `construct`, since Ray imports the class, and so torch, before it
        enters that method.
        """
        for stream in (sys.stdout, sys.stderr):
            print(f"{ACTOR_NAME}{name}", file=stream, flush=True)
        apply_environment(environment, meeting_address=meeting_address)

    def construct(
        self, what: type, arguments: Mapping[str, Any], environment_set: None = None
    ) -> None:
        """Construct the learner or the engine.

        Args:
            environment_set: the result of `set_environment`, for which Ray waits.
        """
        try:
            self._object = what(**arguments)
        # Ray cannot always carry this error, and its text has all settings.
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (what.__name__, error.title, *first["loc"])))
            words = " ".join(first["msg"].removeprefix("Value error, ").rstrip(".").split())
            raise InputError(f"{where}: {words}; change the flag that this is about") from None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        this_process.begin(f"busy with {method}")
        try:
            return getattr(self._object, method)(*args, **kwargs)
        finally:
            this_process.begin("waiting for the driver")


def allocator_environment(*, on_gpus: bool, hands_over_memory: bool) -> dict[str, str]:
    """The variable of torch's allocator: segments grow, which leaves no gaps between batches.

    Args:
        hands_over_memory: the process shares device memory with another one, which cannot map
            segments that grow: weights by "ipc", and the buffers in which the GPUs of an engine
            reduce. Then segments never grow, even if the node's own setting asks for it.
    """
    if not on_gpus:
        return {}
    if hands_over_memory:
        return {ALLOCATOR: SEGMENTS_STAY}
    return {ALLOCATOR: SEGMENTS_GROW}


def drop_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Find variables that make torch's allocator grow segments; returns them without that part."""
    changed_variables: dict[str, str] = {}
    for name in (ALLOCATOR, SAME_AS[ALLOCATOR]):
        value = environment.get(name, "")
        rest = re.sub(r"expandable_segments\s*:\s*True\s*,?\s*", "", value)
        if rest != value:
            changed_variables[name] = rest.rstrip(", ")
    return changed_variables


def apply_environment(environment: Mapping[str, str], *, meeting_address: str) -> None:
    """Set variables in this process, also the interface by which gloo and NCCL reach the others.

    By default gloo takes the address of the host's name, which on many machines is 127.0.1.1, and
    NCCL the first interface it finds. A node's own settings stay, except segments that grow in a
    process that hands over memory.
    """
    if environment.get(ALLOCATOR) == SEGMENTS_STAY:
        for name, rest in drop_growing_segments(os.environ).items():
            value = os.environ.pop(name)
            print(f"{name} is {value}, of which {SEGMENTS_GROW} is left out here", flush=True)
            if rest:
                os.environ[name] = rest
    for name, value in {**_choose_interfaces(meeting_address), **environment}.items():
        if name not in NODE_SETTINGS or not {name, SAME_AS.get(name, name)} & os.environ.keys():
            os.environ[name] = value


def _choose_interfaces(meeting_address: str) -> dict[str, str]:
    interface: str | None = LOOPBACK_INTERFACE
    if meeting_address != LOOPBACK:
        interface = find_interface(find_address_towards(meeting_address, 1))
    if interface is None:
        return {}
    # Without "=" NCCL takes all interfaces whose names begin like it.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
