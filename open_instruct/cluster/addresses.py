"""Addresses by which the processes of a run reach each other: loopback, or the outward one."""

import os
import socket
from dataclasses import dataclass

from open_instruct.parallel.listening import LOOPBACK


@dataclass(frozen=True, slots=True)
class Host:
    """One machine.

    Neither field is unique: containers on two machines may share a name, or an address.
    """

    address: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The hosts of the driver, the learners and the engines of a run.

    Example: engines alone on host B are `Whereabouts(driver=A, learners={A}, engines={B})`.
    """

    driver: Host
    learners: frozenset[Host]
    engines: frozenset[Host]

    def share_memory(self) -> bool:
        """Whether learners and engines are on one host.

        The driver may be elsewhere: it holds no weights.
        """
        return len(self.learners | self.engines) == 1

    def meeting_address(self) -> str:
        """The address at which learners and engines meet the driver.

        It is loopback only if everything is on the driver's host: learners that meet on loopback
        would offer the engines no other address for the weights.
        """
        if self.learners | self.engines == {self.driver}:
            return LOOPBACK
        return self.driver.address


def find_address_towards(host: str, port: int) -> str:
    """The address of this machine from which packets to `host` would leave; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def find_outward_address() -> str:
    """The address at which peers reach this process: towards its process group's meeting point."""
    host = os.environ.get("MASTER_ADDR", LOOPBACK)
    port = int(os.environ.get("MASTER_PORT", "1"))
    return find_address_towards(host, port)


def find_interface(address: str) -> str | None:
    """Find the network interface with this address; None if no interface has it."""
    import psutil  # only now: not every command needs it

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
