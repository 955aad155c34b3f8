"""What is set in a process of the fleet before torch, or vLLM, is imported there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from open_instruct.cluster.addresses import address_towards, interface_of
from open_instruct.cluster.watchdog import ACTOR_NAME
from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# A node's own settings; torch's allocator has two names for its own.
KEPT = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", ALLOCATOR}
SAME_AS = {ALLOCATOR: "PYTORCH_ALLOC_CONF"}


def allocator_environment(*, on_gpus: bool, hands_over_memory: bool) -> dict[str, str]:
    """Segments that grow, which leave no gaps where batches differ in size.

    Args:
        hands_over_memory: to another process, which cannot map such segments as it maps others (weights by "ipc").
    """
    return {ALLOCATOR: "expandable_segments:True"} if on_gpus and not hands_over_memory else {}


def take_environment(environment: Mapping[str, str], *, meeting_address: str) -> None:
    """Set variables in this process, and have gloo and NCCL talk through the interface that leads to where all meet.

    Left alone gloo would take the address of the host's name, which on many a machine is 127.0.1.1, and NCCL the first
    interface it likes. What a node sets for itself stays.
    """
    for name, value in {**_interfaces(meeting_address), **environment}.items():
        if name not in KEPT or not {name, SAME_AS.get(name, name)} & os.environ.keys():
            os.environ[name] = value


def go_by(name: str) -> None:
    """Say, in what a worker of Ray writes, who it is: "learner-0", "engine-1". Its log is kept under that name."""
    for stream in (sys.stdout, sys.stderr):
        print(f"{ACTOR_NAME}{name}", file=stream, flush=True)


def _interfaces(meeting_address: str) -> dict[str, str]:
    is_here = meeting_address == LOOPBACK
    interface = LOOPBACK_INTERFACE if is_here else interface_of(address_towards(meeting_address, 1))
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # else all that begin like it
