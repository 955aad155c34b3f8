"""Walls that a process puts up around itself before it runs a word of a foreign program.

Landlock closes the files, seccomp all system calls but those that a program needs, limits of
resources its memory and its time. None of them can be taken down again. A wall that this machine
has not is left out: trial.py finds out which stand.
"""

import ctypes
import errno
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from landlockpy import AccessFS, LandlockError, Ruleset, Scope

from open_instruct.core.tables import read_yaml_table

TABLES = read_yaml_table(Path(__file__).with_name("walls.yaml"))
TRUNCATE_ABI = 3  # of Landlock: Linux 6.2
CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
READ = AccessFS.READ_FILE | AccessFS.EXECUTE  # libraries are mapped to be executed


class Walls:
    """The walls that this machine has, made ready once, and put up in every child."""

    def __init__(self) -> None:
        endings = ("/site-packages", "/dist-packages")
        packages = [path for path in sys.path if path.endswith(endings)]
        libraries = f"{sys.base_prefix}/lib"
        # What a path of imports names beside these, such as the checkout of a project, may hold
        # rows and their answers.
        sys.path[:] = [path for path in sys.path if path in packages or path.startswith(libraries)]
        self._ruleset = _build_ruleset(
            [*packages, libraries, f"{libraries}64", *TABLES["readable"]]
        )
        abi = None if self._ruleset is None else self._ruleset.abi_version
        self.filter = _filter(refused_flags=_refused_flags(abi))

    def put_up(self, *, cpu_s: int) -> None:
        """Put up all walls; raises if one that this machine has cannot be put up."""
        limits = {**TABLES["limits"], "CPU": cpu_s}
        if self.filter is None:
            limits["NPROC"] = 0  # a second best: root is exempt, and threads count too
        for name, most in limits.items():
            # MacOS has no limit of memory; a lower limit than ours stays.
            with suppress(ValueError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        if sys.platform == "linux":
            # Root too is to have no privileges, such as that of raising its limits again.
            ctypes.CDLL(None).capset(
                (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
            )
        if self._ruleset is not None:
            self._ruleset.restrict()
        if self.filter is not None:
            self.filter.load()


def _build_ruleset(readable: list[str]) -> Ruleset | None:
    """Landlock's rules: these may be read, and nothing is written; None without Landlock."""
    try:
        ruleset = Ruleset(scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL)
    except LandlockError:
        return None
    for path in filter(os.path.exists, readable):
        access = READ
        if os.path.isdir(path):
            access |= AccessFS.READ_DIR
        ruleset.allow_path(path, access)
    ruleset.allow_path(os.devnull, AccessFS.READ_FILE | AccessFS.WRITE_FILE)
    return ruleset


def _refused_flags(landlock_abi: int | None) -> int:
    """The flags with which no file may be opened, as Landlock does not forbid what they do.

    `landlock_abi` is None without Landlock.
    """
    if landlock_abi is None:
        # So files can be read at least, and not changed.
        return os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
    if landlock_abi < TRUNCATE_ABI:
        return os.O_TRUNC
    return 0


def _filter(*, refused_flags: int) -> Any:
    """The filter of system calls; None where there is no seccomp, or no libseccomp.

    A call that libseccomp does not know stays refused.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError):
        return None
    calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    rules: list[list[Any]] = [[name] for name in " ".join(TABLES["allowed"]).split()]
    rules += TABLES["allowed_by_argument"]
    for name, number in TABLES["opening"].items():
        without_flags = [number, "MASKED_EQ", refused_flags, 0]
        rule = [name]
        if refused_flags:
            rule.append(without_flags)
        rules.append(rule)
    for name, *conditions in rules:
        arguments = [
            pyseccomp.Arg(number, getattr(pyseccomp, comparison), *values)
            for number, comparison, *values in conditions
        ]
        with suppress(OSError):
            calls.add_rule(pyseccomp.ALLOW, name, *arguments)
    for ends in TABLES["numbers_of_newer_calls"]:
        for number in range(*ends):
            with suppress(OSError):
                calls.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)
    return calls
