"""Walls around an agent: it speaks to its endpoint alone, and writes to a folder of its own alone.

They are for agents that run what the policy writes. All that the agent starts is behind them, too,
and none of it can take them down. They are wider than those around programs of the policy
(rewards/sandbox/walls.py), since an agent reads its own code and libraries, and starts processes.
"""

import errno
import os
import socket
from importlib.util import find_spec

from landlockpy import AccessFS, AccessNet, LandlockError, Ruleset, Scope

from open_instruct.core.errors import InputError

READ = AccessFS.READ_FILE | AccessFS.READ_DIR | AccessFS.EXECUTE
NET_ABI = 4  # of Landlock: Linux 6.7
SOCKET_TYPE = 0xF  # the bits of `socket`'s second argument that are the type


def find_missing_wall() -> str:
    """What this machine lacks for the walls; empty if it has all."""
    try:
        with Ruleset() as ruleset:
            abi = ruleset.abi_version
    except LandlockError:
        abi = 0
    if abi < NET_ABI:
        return "Landlock that knows networks (Linux 6.7)"
    if find_spec("pyseccomp") is None:
        return "libseccomp"
    return ""


def refuse_missing_walls() -> None:
    """Refuse `--agent_sandbox` where there can be no walls.

    Raises:
        InputError: this machine lacks something for them.
    """
    missing = find_missing_wall()
    if missing:
        raise InputError(
            f"--agent_sandbox: {socket.gethostname()} has no {missing}; leave it out where agents "
            "run nothing that the policy writes",
            kind="machine",
        )


def put_up_walls(*, port: int, folder: str) -> None:
    """Put the walls up around this process and all that it will start.

    Args:
        port: of TCP, the only one that it may speak to.
        folder: the only one that it may write to.
    """
    import pyseccomp

    with Ruleset(scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL) as ruleset:
        ruleset.allow_path("/", READ)
        ruleset.allow_path(folder, ruleset.handled_fs)
        ruleset.allow_path(os.devnull, AccessFS.READ_FILE | AccessFS.WRITE_FILE)
        ruleset.allow_port(port, AccessNet.CONNECT_TCP)
        ruleset.restrict()
    # Landlock knows TCP alone.
    calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
            calls.add_rule(
                pyseccomp.ERRNO(errno.EPERM),
                "socket",
                pyseccomp.Arg(0, pyseccomp.EQ, family),
                pyseccomp.Arg(1, pyseccomp.MASKED_EQ, SOCKET_TYPE, kind),
            )
    calls.load()
