"""The process of a learner or an engine: it sets its environment, then constructs that, then calls
its methods.

Environment variables are set before torch or vLLM is imported there.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from open_instruct.cluster.addresses import address_towards, interface_of
from open_instruct.cluster.watchdog import ACTOR_NAME
from open_instruct.core.errors import InputError
from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE
from open_instruct.parallel.status import this_process

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# A node's own settings; torch's allocator has two names for its own.
KEPT = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", ALLOCATOR}
SAME_AS = {ALLOCATOR: "PYTORCH_ALLOC_CONF"}
SEGMENTS_GROW, SEGMENTS_STAY = (f"expandable_segments:{grow}" for grow in (True, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A process and its place:

    `gpu_ids` are given by Ray, `num_cores` counts those of its machine.
    """

    pid: int
    address: str
    gpu_ids: tuple[str, ...]
    num_cores: int


class ActorHost:
    """The Ray actor of a learner or an engine.

    Ray runs the methods of a learner's one after the other, in the order of the driver's calls,
    those of an engine's side by side.
    """

    _held: Any = None

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
        """Set environment variables, and write `name` into the log, which is kept under it, such as
        "learner-0".

        This comes in a call before `construct`, since Ray imports the class, and so torch, before
        it enters that method.
        """
        for stream in (sys.stdout, sys.stderr):
            print(f"{ACTOR_NAME}{name}", file=stream, flush=True)
        take_environment(environment, meeting_address=meeting_address)

    def construct(
        self, what: type, arguments: Mapping[str, Any], environment_set: None = None
    ) -> None:
        """Construct the learner or the engine; where calls run side by side, `environment_set` has
        this one wait.
        """
        try:
            self._held = what(**arguments)
        # Which Ray cannot always carry, and which says all settings.
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (what.__name__, error.title, *first["loc"])))
            words = " ".join(first["msg"].removeprefix("Value error, ").rstrip(".").split())
            raise InputError(f"{where}: {words}; change the flag that this is about") from None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        this_process.begin(f"busy with {method}")
        try:
            return getattr(self._held, method)(*args, **kwargs)
        finally:
            this_process.begin("waiting for the driver")


def allocator_environment(*, on_gpus: bool, hands_over_memory: bool) -> dict[str, str]:
    """The setting of torch's allocator: segments grow, which leaves no gaps if batches differ in
    size.

    Args:
        hands_over_memory: the process shares device memory with another one, which cannot map
            segments that grow: weights by "ipc", and the buffers in which the GPUs of an engine
            reduce. Then segments never grow, even if the node's own setting asks for it.
    """
    return {ALLOCATOR: SEGMENTS_STAY if hands_over_memory else SEGMENTS_GROW} if on_gpus else {}


def without_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of torch's allocator that make segments grow, by name, each without that
    part.
    """
    asked = {name: environment.get(name, "") for name in (ALLOCATOR, SAME_AS[ALLOCATOR])}
    left = {
        name: re.sub(r"expandable_segments\s*:\s*True\s*,?\s*", "", value)
        for name, value in asked.items()
    }
    return {name: left[name].rstrip(", ") for name in asked if left[name] != asked[name]}


def take_environment(environment: Mapping[str, str], *, meeting_address: str) -> None:
    """Set variables in this process, among them the interface through which gloo and NCCL reach
    `meeting_address`.

    By default gloo takes the address of the host's name, which on many machines is 127.0.1.1, and
    NCCL the first interface it finds. A node's own settings stay, except segments that grow in a
    process that hands over memory.
    """
    if environment.get(ALLOCATOR) == SEGMENTS_STAY:
        for name, left in without_growing_segments(os.environ).items():
            print(
                f"{name} is {os.environ.pop(name)}, of which {SEGMENTS_GROW} is left out here",
                flush=True,
            )
            os.environ |= {name: left} if left else {}
    for name, value in {**_interfaces(meeting_address), **environment}.items():
        if name not in KEPT or not {name, SAME_AS.get(name, name)} & os.environ.keys():
            os.environ[name] = value


def _interfaces(meeting_address: str) -> dict[str, str]:
    is_here = meeting_address == LOOPBACK
    interface = LOOPBACK_INTERFACE if is_here else interface_of(address_towards(meeting_address, 1))
    if interface is None:
        return {}
    # Else all that begin like it.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
