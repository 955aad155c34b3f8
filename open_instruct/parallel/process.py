"""Start and stop the process group, one process or a thousand, by the same call."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from olmo_core.distributed.utils import (
    all_gather_object,
    broadcast_object,
    get_local_rank,
    get_rank,
    init_distributed,
)
from olmo_core.utils import seed_all

from open_instruct.parallel.data_parallel import set_mesh
from open_instruct.parallel.listening import LOOPBACK_INTERFACE
from open_instruct.parallel.status import this_process
from open_instruct.parallel.triton_cache import set_triton_cache

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """This process's place in the run.

    `gpus_per_node` counts the processes of every node, in rank order.
    """

    rank: int
    local_rank: int
    device: torch.device
    gpus_per_node: tuple[int, ...]


def start_process(*, timeout_s: int, seed: int) -> Process:
    """Join the process group and seed every source of randomness.

    Under torchrun the group is torchrun's; otherwise this process is a group of its own. With CUDA,
    GPU tensors travel over NCCL and host tensors over gloo; without, everything over gloo.
    """
    # OLMo-core prints its messages where INFO is not logged.
    logging.getLogger().setLevel(logging.INFO)
    on_cuda = torch.cuda.is_available()
    # Packed rows differ in length from step to step. In bfloat16 on a CPU oneDNN keeps a compiled
    # product for each shape it has met, by default 1,024 of them, which takes gigabytes.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    alone: dict[str, Any] = {}
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # A single process needs no TCP store, which would listen on every interface.
        alone = {
            "store": dist.HashStore(),
            "rank": 0,
            "world_size": 1,
        }
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    # OLMo-core's own default backend calls CUDA even where there is none.
    init_distributed(
        backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
        shared_filesytem=True,  # the parameter's spelling
        **alone,
    )
    seed_all(seed)
    local_rank = get_local_rank()
    set_triton_cache(local_rank)
    this_process.start_heartbeats(rank=dist.get_rank(), num_ranks=dist.get_world_size())
    return Process(
        rank=dist.get_rank(),
        local_rank=local_rank,
        device=torch.device("cuda", local_rank) if on_cuda else torch.device("cpu"),
        gpus_per_node=find_gpus_per_node(),
    )


def find_gpus_per_node() -> tuple[int, ...]:
    """The processes of each node of the process group, in rank order. Collective.

    A node begins wherever a process has local rank 0.
    """
    sizes: list[int] = []
    for local in gather_objects(get_local_rank()):
        if local == 0:
            sizes.append(0)
        sizes[-1] += 1
    return tuple(sizes)


def gather_objects(rank_object: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The objects of all ranks in rank order; without a process group, this one's alone.

    Collective.
    """
    return all_gather_object(rank_object, group)


def run_on_main_process(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and give every rank its result, or raise its error on every rank.

    Every rank must call this; the result must be picklable and small.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    if get_rank() == 0:
        try:
            outcome = (function(), None)
        except Exception as error:
            outcome = (None, error)
    result, failure = broadcast_object(outcome)
    if failure is not None:
        raise failure
    return cast(T, result)


def stop_process() -> None:
    """Leave the process group, and let a later one in this process build its mesh anew."""
    this_process.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
    set_mesh(None)
