"""torchrun on one node without an open port: `torchrun --rdzv_backend loopback --nproc_per_node 8 PROGRAM …`.

By itself torchrun keeps two stores that listen on every interface of the machine, with no password. Who reaches
them can have the ranks connect to a process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE, listen_at


class LoopbackRendezvous(RendezvousHandler):
    """The agent of one node meets nobody, and keeps the store of its ranks on loopback."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = listen_at(LOOPBACK)
        # The ranks inherit it: else gloo and NCCL listen on the interface that the machine's name stands for.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """For torchrun.

    Raises:
        ValueError: there are other nodes, to which a loopback is closed.
    """
    if parameters.max_nodes != 1:
        raise ValueError("--rdzv_backend loopback is for one node; of several, give --master_addr and --node_rank")
    return LoopbackRendezvous(parameters.run_id)


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun calls once it has found this package's entry point."""
    return make_rendezvous
