"""A key-value store that listens at one address, where torch's own listens on every interface."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def open_listening_store(address: str, **options: Any) -> TCPStore:
    """The store, kept in this process at `address` and at no other; its port is a free one.

    The socket is bound here, once and for good: a free port that is looked up for the store to bind
    later may be another process's by then. `options` are those of `TCPStore`.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        **options,
    )
