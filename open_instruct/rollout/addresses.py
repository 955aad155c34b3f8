"""At which address processes reach each other: this machine's own, or the one that another machine sees."""

from __future__ import annotations

import os
import socket
import sys

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def address_towards(host: str, port: int) -> str:
    """The address of this machine that packets to `host` carry; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def outward_address() -> str:
    """This process's address as its peers reach it: the one towards the meeting point of its process group."""
    return address_towards(os.environ.get("MASTER_ADDR", LOOPBACK), int(os.environ.get("MASTER_PORT", "1")))
