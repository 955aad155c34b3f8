"""torchrun on one node without an open port: `torchrun --rdzv_backend loopback --nproc_per_node 8 PROGRAM …`.

By itself torchrun keeps two stores that listen on every interface of the machine, with no password. Who reaches
them can have the ranks connect to a process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE, listen_at


class LoopbackRendezvous(StaticTCPRendezvous):
    """The agent of one node meets nobody, and keeps the store of its ranks on loopback."""

    def __init__(self, run_id: str) -> None:
        store = listen_at(LOOPBACK)
        super().__init__(LOOPBACK, store.port, rank=0, world_size=1, run_id=run_id, timeout=0)
        self._store = store  # in place of the one that would be made for the first rendezvous
        # The ranks inherit it: else gloo and NCCL listen on the interface that the machine's name stands for.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)

    def get_backend(self) -> str:
        return "loopback"


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
