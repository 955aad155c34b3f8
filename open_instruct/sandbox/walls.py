"""What keeps a program in: walls that a process puts up around itself, before it runs a word of the program.

Landlock closes the files, seccomp the calls that lead out of a process, limits of resources its memory and its time.
None of them can be taken down again. A wall that this machine has not is left out: trial.py finds out which stand.
"""

import ctypes
import errno
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from landlockpy import AccessFS, LandlockError, Ruleset, Scope

TABLES = yaml.safe_load(Path(__file__).with_name("walls.yaml").read_text(encoding="utf-8"))
TRUNCATE_ABI = 3  # of Landlock: Linux 6.2
CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
READ = AccessFS.READ_FILE | AccessFS.EXECUTE  # libraries are mapped to be executed


class Walls:
    """The walls that this machine has, made ready once, and put up in every child."""

    def __init__(self) -> None:
        packages = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
        libraries = f"{sys.base_prefix}/lib"
        # What a path of imports names beside these, such as the checkout of a project, may hold rows and their answers.
        sys.path[:] = [path for path in sys.path if path in packages or path.startswith(libraries)]
        self._ruleset = _ruleset([*packages, libraries, f"{libraries}64", *TABLES["readable"]])
        self.filter = _filter(is_truncate_free=self._ruleset is not None and self._ruleset.abi_version < TRUNCATE_ABI)

    def put_up(self, *, cpu_s: int) -> None:
        """Raises if a wall that this machine has cannot be put up."""
        limits = {**TABLES["limits"], "CPU": cpu_s}
        if self.filter is None:
            limits["NPROC"] = 0  # a second best: root is exempt, and threads count too
        for name, most in limits.items():
            with suppress(ValueError):  # macOS has no limit of memory; a lower limit than ours stays
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        if sys.platform == "linux":
            # Root too is to have no privileges, such as that of raising its limits again.
            ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
        if self._ruleset is not None:
            self._ruleset.restrict()
        if self.filter is not None:
            self.filter.load()


def _ruleset(readable: list[str]) -> Ruleset | None:
    """Landlock's rules: these may be read, and nothing is written; None where there is no Landlock."""
    try:
        ruleset = Ruleset(scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL)
    except LandlockError:
        return None
    for path in filter(os.path.exists, readable):
        ruleset.allow_path(path, READ | AccessFS.READ_DIR if os.path.isdir(path) else READ)
    ruleset.allow_path(os.devnull, AccessFS.READ_FILE | AccessFS.WRITE_FILE)
    return ruleset


def _filter(*, is_truncate_free: bool) -> Any:
    """The filter of system calls; None where there is no seccomp, or no libseccomp."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError):
        return None
    calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in " ".join(TABLES["denied"]).split():
        calls.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    more = TABLES["denied_without_truncate"] if is_truncate_free else []
    for name, number, comparison, *values in [*TABLES["denied_by_argument"], *more]:
        argument = pyseccomp.Arg(number, getattr(pyseccomp, comparison), *values)
        calls.add_rule(pyseccomp.ERRNO(errno.EPERM), name, argument)
    for ends in TABLES["numbers_of_newer_calls"]:
        for number in range(*ends):
            with suppress(OSError):  # libseccomp is older than the call
                calls.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)
    return calls
