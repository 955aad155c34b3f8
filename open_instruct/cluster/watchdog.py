"""A watchdog outlives the driver and removes all that a local Ray leaves, also after `kill -9`.

Ray's servers end with the driver, but other things may stay: agents for half a minute, a frozen
actor for ever, the folder of sockets and logs, and shared memory of processes that were killed.
Every process of the cluster has a mark in its environment, which children inherit. Ray's agents and
workers overwrite it with their names, but they stay in the session of the process that started Ray.
The watchdog notes the shared memory of these processes while they live, and waits for the end of
the driver. Then it kills every process with the mark or in that session, and removes their shared
memory and the folder. An orderly end takes the same way.

The file is also run by its path, and imports the standard library only, so a watchdog costs a few
megabytes.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Also the prefix under which a process of the fleet may keep files in shared memory.
MARK_VARIABLE = "OPEN_INSTRUCT_FLEET"
# A folder for other temporary files of these processes; it is removed in the end.
FOLDER_VARIABLE = "OPEN_INSTRUCT_FLEET_FOLDER"
SHARED_MEMORY = Path("/dev/shm")
# Names by Python's multiprocessing, vLLM, torch and NCCL. A user's model in shared memory may be
# mapped too, and stays.
SHARED_PREFIXES = ("psm_", "sem.mp-", "vllm_", "torch_", "nccl-")
# Begins a log line with the name of a worker. Ray's own lines begin with a colon too.
ACTOR_NAME = ":actor_name:"
POLL_INTERVAL_S = 1.0
SWEEP_TIMEOUT_S = 20.0


class Watchdog:
    """The driver's handle on the watchdog."""

    def __init__(self, folder: Path, *, logs_folder: Path | None) -> None:
        """Start the watchdog.

        In the end it removes `folder`, after it copied the workers' logs to `logs_folder`.
        """
        self._variables = {
            MARK_VARIABLE: f"open_instruct-{os.getpid()}-{os.urandom(4).hex()}",
            FOLDER_VARIABLE: str(folder),
        }
        mark = self._variables[MARK_VARIABLE]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                __file__,
                mark,
                str(os.getpid()),
                str(folder),
                str(logs_folder or ""),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is for the driver
        )

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Processes that are started in here, and those that they start, end with the driver."""
        os.environ.update(self._variables)
        try:
            yield
        finally:
            for name in self._variables:
                del os.environ[name]

    def finish(self) -> None:
        """Sweep now; returns when nothing is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(
    mark: str,
    driver: int,
    folder: Path,
    logs_folder: Path | None,
) -> None:
    """Wait for the driver's end, then sweep."""
    # These are for the driver.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    shared_files: set[int] = set()
    sessions: set[int] = set()
    # The pipe tells at once, unless a forked child of the driver holds its other end too.
    while os.getppid() == driver:
        # An engine that dies, and is started again, is not there to be looked at in the end.
        pids = _find_living(mark, sessions)
        if _has_unknown_files(shared_files):
            shared_files |= _find_shared_memory(pids)
        if select.select([sys.stdin], [], [], POLL_INTERVAL_S)[0]:
            break
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while time.monotonic() < deadline:
        pids = _find_living(mark, sessions)
        if not pids:
            break
        shared_files |= _find_shared_memory(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if logs_folder is not None:
        with contextlib.suppress(OSError):
            _copy_logs(folder, logs_folder)
    shutil.rmtree(folder, ignore_errors=True)
    for path in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):
            is_theirs = path.name.startswith(SHARED_PREFIXES) and path.stat().st_ino in shared_files
            if is_theirs or path.name.startswith(mark):
                path.unlink()


def _find_living(mark: str, sessions: set[int]) -> list[int]:
    """Find the processes with the mark, and those in a session that one of them leads.

    It finds none without /proc. `sessions` holds the ids of these sessions from one call to the
    next, and is updated here.
    """
    entry = f"{MARK_VARIABLE}={mark}".encode()
    pids = []
    still_there = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            state, _, _, number = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            pid = int(folder.name)
            session = int(number)
            has_mark = entry in (folder / "environ").read_bytes().split(b"\0")
            if has_mark and session == pid:
                sessions.add(session)
            if state != b"Z" and (has_mark or session in sessions):
                pids.append(pid)
                still_there.add(session)
    sessions &= still_there  # the number of one that has ended may be given again
    return pids


def _has_unknown_files(known_inodes: set[int]) -> bool:
    """Whether a file in shared memory has a name like theirs, and is not known to be.

    The maps of a process with PyTorch have thousands of lines: reading those of a run costs 40 ms.
    """
    for path in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            if path.name.startswith(SHARED_PREFIXES) and path.stat().st_ino not in known_inodes:
                return True
    return False


def _find_shared_memory(pids: list[int]) -> set[int]:
    """The inodes of shared memory that these processes have mapped, also before it has a name."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            lines = [line for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line]
            inodes.update(int(line.split()[4]) for line in lines)
    return inodes


def _copy_logs(folder: Path, logs_folder: Path) -> None:
    """Copy the logs in which a worker wrote something, each under the last name of its worker."""
    paths = folder.glob("*/session_2*/logs/worker-*")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        lines = path.read_bytes().splitlines()
        names = [
            line.decode().removeprefix(ACTOR_NAME)
            for line in lines
            if line.startswith(ACTOR_NAME.encode())
        ]
        if any(not line.startswith(b":") for line in lines):
            logs_folder.mkdir(parents=True, exist_ok=True)
            name = path.stem
            if names and "-" in names[-1]:
                name = names[-1]
            # A worker that was started again has another log.
            earlier = [
                *logs_folder.glob(f"{name}{path.suffix}"),
                *logs_folder.glob(f"{name}.*{path.suffix}"),
            ]
            if earlier:
                name = f"{name}.{len(earlier) + 1}"
            shutil.copy(path, logs_folder / f"{name}{path.suffix}")


if __name__ == "__main__":
    mark, driver, folder, logs = sys.argv[1:]
    main(mark, int(driver), Path(folder), Path(logs) if logs else None)
