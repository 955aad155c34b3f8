"""What a launch on one node listens at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import programs

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).resolve().parents[2]
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

# A run that has met; it tells what torchrun and its ranks listen at.
PROGRAM = """
import json, os, psutil
import torch.distributed as dist
from open_instruct.parallel.process import start_process, stop_process
start_process(timeout_s=60, seed=0)
dist.barrier()
if dist.get_rank() == 0:
    launcher = psutil.Process(os.getppid())
    processes = [launcher, *launcher.children(recursive=True)]
    listening = {
        process.pid: [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        for process in processes
    }
    print(json.dumps({"launcher": launcher.pid, "listening": listening}), flush=True)
dist.barrier()
stop_process()
"""

ALONE = """
import json, psutil
from open_instruct.parallel.process import start_process, stop_process
start_process(timeout_s=60, seed=0)
stop_process()
start_process(timeout_s=60, seed=0)  # as one program may, one run after the other
print(json.dumps([c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]))
"""


def launch(program: Path, *command: str) -> subprocess.CompletedProcess[str]:
    bin_folder = Path(sys.executable).parent
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")
    }
    return subprocess.run(
        [*command, str(program)],
        cwd=REPOSITORY,
        env=environment
        | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        | {"NUM_NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "GPUS_PER_NODE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("is_script", [True, False], ids=["script", "torchrun"])
def test_launch_on_one_node_listens_on_loopback_alone(
    program: Path, monkeypatch: pytest.MonkeyPatch, is_script: bool
) -> None:
    if is_script:
        done = launch(program, "scripts/launch_multi_node.sh")
        code, said, told = done.returncode, done.stdout, done.stderr
    else:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.delenv(name, raising=False)
        torchrun = [*programs.TORCHRUN, "--rdzv_backend", "loopback", "--nproc_per_node", "2"]
        process = programs.start([*torchrun, str(program)])
        code = process.wait(timeout=120)
        said = told = process.said()
    assert code == 0, told
    report = json.loads(next(line for line in said.splitlines() if line.startswith('{"launcher"')))
    assert len(report["listening"]) >= 3 and report["listening"][str(report["launcher"])]
    assert {
        address for addresses in report["listening"].values() for address in addresses
    } <= LOOPBACK


def test_process_alone_keeps_no_store(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    done = launch(program, sys.executable)
    assert done.returncode == 0, done.stderr
    assert {address for address, _ in json.loads(done.stdout.splitlines()[-1])} <= LOOPBACK


def test_several_nodes_cannot_meet_on_a_loopback(program: Path) -> None:
    done = launch(
        program, "torchrun", "--rdzv_backend", "loopback", "--nnodes", "2", "--nproc_per_node", "1"
    )
    assert done.returncode == 1
    assert "--rdzv_backend loopback is for one node" in done.stderr
