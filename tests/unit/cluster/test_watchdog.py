"""Shared memory goes with the driver that it belongs to, whatever becomes of the processes that
made it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from open_instruct.cluster.watchdog import POLL_INTERVAL_S, SHARED_MEMORY, _copy_logs
from tests.waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason=f"no {SHARED_MEMORY} here")

# Shared memory as vLLM makes it, without the tracker that would remove it; and a file that is
# mapped, but not its own.
WORKER = """
import json, mmap, os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda name, kind: None
memory = SharedMemory(create=True, size=4096)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(json.dumps({"pid": os.getpid(), "name": memory.name}) + "\\n", end="", flush=True)  # whole, between the other's
time.sleep(600)
"""

DRIVER = """
import subprocess, sys, time
from pathlib import Path
from open_instruct.cluster.watchdog import Watchdog
watchdog = Watchdog(Path(sys.argv[1]), logs_folder=None)
with watchdog.marking():
    workers = [subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[3]]) for _ in range(2)]
    time.sleep(600)
"""


@pytest.fixture
def model() -> Iterator[Path]:
    """A file that somebody keeps in shared memory."""
    path = SHARED_MEMORY / f"test-{os.getpid()}.safetensors"
    path.write_bytes(b"weights")
    yield path
    path.unlink()


def test_watchdog_ends_only_what_a_killed_driver_started(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), WORKER, str(model)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    workers = [json.loads(driver.stdout.readline()) for _ in range(2)]
    memories = [SHARED_MEMORY / worker["name"] for worker in workers]
    # One ends before the driver, as an engine does that is started again; it has been looked at by
    # then.
    time.sleep(3 * POLL_INTERVAL_S)
    os.kill(workers[0]["pid"], signal.SIGKILL)
    assert all(memory.exists() for memory in memories)

    driver.kill()
    driver.wait()
    eventually(lambda: not folder.exists() and not any(memory.exists() for memory in memories))
    assert model.read_bytes() == b"weights"


def test_process_that_wrote_over_its_environment_ends_with_the_session(tmp_path: Path) -> None:
    """As Ray's agents do when they name themselves; the one that began the session has ended by
    then.
    """
    renamed = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True); "
        "input()"
    )
    driver = f"""
import subprocess, sys, time
from pathlib import Path
from open_instruct.cluster.watchdog import POLL_INTERVAL_S, Watchdog
watchdog = Watchdog(Path({str(tmp_path / "folder")!r}), logs_folder=None)
with watchdog.marking():
    leader = subprocess.Popen([sys.executable, "-c", {renamed!r}], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(3 * POLL_INTERVAL_S)
leader.kill()
time.sleep(3 * POLL_INTERVAL_S)
watchdog.finish()
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    found = subprocess.run(
        [sys.executable, "-c", driver],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    status = Path(f"/proc/{int(found.stdout)}/status")
    # Nobody may have asked how it ended.
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_logs_are_kept_under_the_names_that_workers_went_by(tmp_path: Path) -> None:
    """As Ray names its files, and what it writes at the top of them."""
    there, kept = tmp_path / "ray" / "session_2026-01-01" / "logs", tmp_path / "out" / "logs"
    there.mkdir(parents=True)
    top = b":job_id:01000000\n:actor_name:ActorHost\n"
    for at, (name, said) in enumerate(
        {
            "worker-aa-01000000-11.out": top + b":actor_name:learner-0\nloaded\n",
            "worker-aa-01000000-11.err": top + b":actor_name:learner-0\n",  # said nothing
            "worker-bb-01000000-12.err": top + b":actor_name:engine-1\nold\n",
            "worker-cc-01000000-13.err": top + b":actor_name:engine-1\nnew\n",
            "worker-dd-01000000-14.out": b":job_id:01000000\na task\n",
        }.items()
    ):
        (there / name).write_bytes(said)
        os.utime(there / name, (at, at))
    _copy_logs(tmp_path, kept)
    assert {path.name for path in kept.iterdir()} == {
        *("learner-0.out", "engine-1.err", "engine-1.2.err", "worker-dd-01000000-14.out"),
    }
    assert (kept / "engine-1.2.err").read_bytes().endswith(b"new\n")
