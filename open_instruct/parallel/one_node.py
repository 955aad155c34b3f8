"""torchrun on one node without an open port: `torchrun --rdzv_backend loopback …`.

By default torchrun keeps two stores that listen on every interface of the machine, without a
password. Anyone who reaches them could make the ranks connect to a foreign process.
"""

import os
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE, open_listening_store


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single node, which keeps the store of its ranks on loopback."""

    def __init__(self, run_id: str) -> None:
        store = open_listening_store(LOOPBACK)
        super().__init__(
            LOOPBACK,
            store.port,
            rank=0,
            world_size=1,
            run_id=run_id,
            timeout=0,
        )
        self._store = store  # replaces the store that the first rendezvous would make
        # Inherited by the ranks: otherwise gloo and NCCL listen on the interface of the machine's
        # host name.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)

    def get_backend(self) -> str:
        return "loopback"


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous handler that torchrun asks for.

    Raises:
        ValueError: there are other nodes, which cannot reach a loopback address.
    """
    if parameters.max_nodes != 1:
        raise ValueError(
            "--rdzv_backend loopback is for one node; of several, give --master_addr and "
            "--node_rank"
        )
    return LoopbackRendezvous(parameters.run_id)


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The maker of handlers that this package's entry point gives to torchrun."""
    return make_rendezvous
