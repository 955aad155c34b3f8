"""benchmarks/gpu_check: its report, whatever becomes of a check, and what is counted; cheap checks
are rehearsed.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

from gpu_check import __main__ as program  # noqa: E402
from gpu_check.findings import Findings  # noqa: E402
from gpu_check.listed import SUITES, Check, Suite  # noqa: E402
from gpu_check.runner import check_environment, has_entry  # noqa: E402

FOUND = {
    "headline": "9 < 10",
    "failures": [],
    "notes": ["a note"],
    "tables": [{"title": "T", "rows": [{"a": 1.25}]}],
}
# By its name: what a check does.
BEHAVIOUR = {
    "good": f"import sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps(FOUND))})",
    "broken": "print('<last> words'); raise SystemExit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    # What it starts leads a session of its own, as ranks of torchrun do.
    "hanging": (
        "import os, time; os.fork() or (os.setsid(), print('begun', os.getpid(), flush=True)); "
        "time.sleep(60)"
    ),
}


def fake_command(check: Check, result: Path, work: Path) -> Sequence[str]:
    return [sys.executable, "-S", "-c", BEHAVIOUR[check.name], str(result)]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        Check(name=name, title=name.upper(), limit_s=0.6 if name == "hanging" else 30.0)
        for name in BEHAVIOUR
    ]
    suites = {
        name: Suite(num_gpus=suite.num_gpus, needed=("json",), checks=(*checks,))
        for name, suite in SUITES.items()
    }
    monkeypatch.setattr(program, "SUITES", suites)
    monkeypatch.setattr(program, "check_command", lambda rehearse: fake_command)
    monkeypatch.setattr(program, "TIMES_SLOWER", 1.0)


@pytest.mark.usefixtures("faked")
class TestReport:
    @pytest.mark.parametrize("suite", SUITES)
    def test_failing_or_hanging_check_leaves_the_others(self, suite: str, tmp_path: Path) -> None:
        assert program.main([f"--{suite}", "--rehearse", "--out", str(tmp_path)]) == 1
        report = json.loads((tmp_path / "gpu_check.json").read_text())
        assert report["is_rehearsal"] and report["num_gpus"] == SUITES[suite].num_gpus
        good, broken, killed, hanging = report["checks"]
        assert (good["state"], good["headline"], good["tables"]) == (
            "passed",
            "9 < 10",
            FOUND["tables"],
        )
        assert (broken["state"], broken["why"]) == ("failed", ["ended with code 3"])
        assert broken["last_lines"] == ["<last> words"]
        assert killed["why"] == ["ended by SIGKILL"]
        assert hanging["why"] == ["not done after 1 s"]
        (begun,) = hanging["last_lines"]
        assert not has_entry(Path("/proc") / begun.removeprefix("begun "), b"PYTHONUNBUFFERED=1"), (
            "it lives on"
        )
        page = (tmp_path / "gpu_check.html").read_text()
        assert "proves nothing about a GPU" in page
        assert "&lt;last&gt; words" in page and "9 &lt; 10" in page
        assert "src=" not in page and "http" not in page  # nothing is fetched
        assert "<last> words" in (tmp_path / "gpu_check.log").read_text()

    def test_all_is_well(self, tmp_path: Path) -> None:
        assert program.main(["--rehearse", "--out", str(tmp_path), "--only", "good"]) == 0
        states = [
            check["state"]
            for check in json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
        ]
        assert states == ["passed", "not run", "not run", "not run"]

    def test_checks_are_not_run_without_time(self, tmp_path: Path) -> None:
        assert program.main(["--rehearse", "--out", str(tmp_path), "--limit_s", "0"]) == 0
        checks = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
        assert {check["state"] for check in checks} == {"not run"}

    @pytest.mark.parametrize(
        ("flags", "num_gpus", "told"),
        [
            ([], 0, "--rehearse"),
            (["--node"], 0, "--node takes 8"),
            (["--node"], 4, "--one"),
        ],
    )
    def test_gpu_check_is_refused_without_gpus(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        flags: list[str],
        num_gpus: int,
        told: str,
    ) -> None:
        monkeypatch.setattr(program, "num_gpus", lambda: num_gpus)
        assert program.main([*flags, "--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
        assert not (tmp_path / "out").exists()

    def test_check_of_the_other_suite_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            program.main(["--node", "--only", "waits"])
        assert ended.value.code == 2
        assert "no check waits of --node" in capsys.readouterr().err

    def test_missing_package_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "needy_package.py").write_text("import package_that_is_nowhere")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setitem(
            program.SUITES, "one", Suite(num_gpus=1, needed=("needy_package",), checks=())
        )
        assert program.main(["--rehearse"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "package_that_is_nowhere, which needy_package needs, is missing" in line


def test_every_check_is_there() -> None:
    listed = {check.module for suite in SUITES.values() for check in suite.checks}
    folder = REPOSITORY / "benchmarks" / "gpu_check"
    paths = [
        path
        for name in ("checks", "node")
        for path in (folder / name).glob("*.py")
        if path.stem != "__init__"
    ]
    assert listed == {f"gpu_check.{path.parent.name}.{path.stem}" for path in paths}


def test_run_whose_plan_is_off_fails_its_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gpu_check.checks import throughput

    planned = iter((10.6, 13.0, 13.0, 9.4))

    def pretended(words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        figures = {
            "planned, GiB": next(planned),
            "allocated, GiB": 10.0,
            "MFU": 0.3,
            "tokens/s": 1.0,
        }
        Path(words[words.index("--json") + 1]).write_text(json.dumps(figures))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(throughput.subprocess, "run", pretended)
    throughput.check(findings := Findings(file=tmp_path / "found.json"), tmp_path, rehearse=False)
    assert [told.partition(":")[0] for told in findings.failures] == [
        "uncompiled",
        "uncompiled, blocks recomputed",
    ]


class TestNode:
    """What the checks of a node hold against each other, of runs that are made up."""

    @pytest.fixture
    def findings(self, tmp_path: Path) -> Findings:
        return Findings(file=tmp_path / "found.json")

    @pytest.mark.parametrize(
        ("last_norm", "is_well"),
        [(2.0, True), (2.0 + 1e-4, True), (2.01, False), (float("nan"), False)],
    )
    def test_layout_follows_one_rank(
        self, findings: Findings, tmp_path: Path, last_norm: float, is_well: bool
    ) -> None:
        from gpu_check.node import layouts

        write_steps(tmp_path / layouts.ONE_RANK, [(0.69, 3.0), (0.60, 2.0)])
        write_steps(tmp_path / "TP", [(0.69, 3.0), (0.60, last_norm)])
        layouts.compare(findings, tmp_path, ["TP"], 1e-4)
        assert [told.partition(":")[0] for told in findings.failures] == ([] if is_well else ["TP"])

    @pytest.mark.parametrize("again", [1.0, 2.0])
    def test_resumed_run_is_the_one_never_stopped(
        self, findings: Findings, tmp_path: Path, again: float
    ) -> None:
        """Where two equal runs differ, one that was resumed need only be near."""
        import torch
        from gpu_check.same_run import judge_resumed
        from safetensors.torch import save_file

        for name, weight in {"whole": 1.0, "whole_again": again, "stopped": 1.0001}.items():
            write_steps(tmp_path / name, [(0.69, 3.0)])
            (tmp_path / name / "hf_model").mkdir()
            save_file(
                {"w": torch.tensor([weight])}, tmp_path / name / "hf_model" / "model.safetensors"
            )
        judge_resumed(findings, tmp_path)
        assert bool(findings.failures) == (again == 1.0)

    def test_every_receiver_got_every_version(self, findings: Findings) -> None:
        from gpu_check.node.channel import compare

        sent = {
            "sums": [{"a": 1}, {"a": 2}],
            "seconds": [1.0, 0.5],
            "bytes": 10**9,
            "backend": "nccl",
        }
        compare(findings, sent, [[{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 3}], [{"a": 1}, {}]])
        assert [told.partition(":")[0] for told in findings.failures] == [
            "receiver 1",
            "receiver 2",
        ]
        assert "2.00 GB/s" in findings.headline

    def test_log_probs_of_every_step_must_be_there_and_near(
        self, findings: Findings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from gpu_check.node import engines

        monkeypatch.setattr(engines, "num_mixed", lambda folder, step: 0)
        rows = [{"logprob_diff/mean": 0.009}, {"logprob_diff/mean": 0.011}, {}]
        told = (
            json.dumps(row | {"step": step, "time/sync": 0.1})
            for step, row in enumerate(rows, start=1)
        )
        (tmp_path / "metrics.jsonl").write_text("\n".join(told))
        engines.compare(findings, {"one device": tmp_path})
        assert ["step 2" in findings.failures[0], "step 3" in findings.failures[1]] == [True, True]

    def test_flags_of_engines_that_no_rehearsal_gives_are_taken(
        self, findings: Findings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from gpu_check.node import engines

        from open_instruct.commands.run_flags import parse_run
        from open_instruct.config.grpo import GRPOConfig, validate_grpo

        started: list[tuple[int, int, GRPOConfig]] = []  # with the first device, and how many

        def start(
            words: list[str], *, first_device: int, num_devices: int, rehearse: bool
        ) -> subprocess.Popen[bytes]:
            validate_grpo(config := parse_run(GRPOConfig, words))
            started.append((first_device, num_devices, config))
            return subprocess.Popen(["false"])

        monkeypatch.setattr(engines, "start", start)
        monkeypatch.setattr(engines, "write_tiny_model", lambda folder, **_: folder)
        engines.check(findings, tmp_path, rehearse=False)
        assert [
            (first_device, num_devices, it.fleet.placement, it.fleet.vllm_tensor_parallel_size)
            for first_device, num_devices, it in started
        ] == [
            (0, 3, "split", 1),
            (3, 4, "split", 2),
            (0, 2, "shared", 1),
            (2, 2, "shared", 1),
            (4, 3, "mixed", 1),
        ]
        assert {(it.fleet.vllm_runner, it.fleet.vllm_async_scheduling) for _, _, it in started} == {
            ("v2", "on")
        }
        assert len(findings.failures) == 5

    @pytest.mark.parametrize(
        ("name", "planned", "mfu", "num_failures"),
        [
            ("compiled", 13.0, 0.4, 0),
            ("compiled", 9.0, 0.2, 2),
            ("uncompiled", 10.6, 0.2, 1),
            ("uncompiled", 10, 0, 0),
        ],
    )
    def test_plan_and_the_speed(
        self, findings: Findings, name: str, planned: float, mfu: float, num_failures: int
    ) -> None:
        from gpu_check.node.seven_b import judge

        judge(findings, name, {"planned, GiB": planned, "allocated, GiB": 10.0, "MFU": mfu})
        assert len(findings.failures) == num_failures


def write_steps(folder: Path, steps: Sequence[tuple[float, float]]) -> None:
    folder.mkdir()
    rows = (json.dumps({"loss": loss, "grad_norm": grad_norm}) for loss, grad_norm in steps)
    (folder / "metrics.jsonl").write_text("\n".join(rows))


def test_wait_is_laid_to_the_line_of_the_package_that_asked() -> None:
    from gpu_check.host_waits import WARNED, counted_host_waits

    from open_instruct.losses import logprobs

    def waiting(*_: object) -> None:
        warnings.warn(WARNED, stacklevel=1)

    with counted_host_waits(on_cuda=False) as waits:
        exec(compile("\n" * 9 + "waiting()", logprobs.__file__, "exec"), {"waiting": waiting})
    line = Path(logprobs.__file__).read_text().splitlines()[9].strip()
    assert list(waits) == [f"open_instruct/losses/logprobs.py:10 in <module>: {line}"]


@pytest.mark.parametrize(
    ("driver", "cuda", "is_bad"),
    [
        ("580.159.04", "13.0", False),
        ("570.86.10", "13.0", True),
        ("570.86.10", "12.8", False),
        (None, "13.0", False),
        ("580.1", None, False),
    ],
)
def test_driver_that_is_too_old_is_told(driver: str | None, cuda: str | None, is_bad: bool) -> None:
    from gpu_check.checks.versions import driver_problem

    assert (driver_problem(driver, cuda) is not None) == is_bad


REHEARSAL = """
import sys
from pathlib import Path
from gpu_check import one
folder = Path(sys.argv[1])
for name in ("versions", "attention_speed", "waits", "handing_over", "resting"):
    (folder / name).mkdir()
    sys.argv[1:] = [f"gpu_check.checks.{name}", "--result", str(folder / f"{name}.json")]
    sys.argv += ["--work", str(folder / name), "--rehearse"]
    assert one.main() == 0, name
print(sorted({"ray", "vllm", "datasets", "pyarrow", "pandas"} & set(sys.modules)))
"""


@pytest.mark.extended
def test_checks_in_rehearsal_need_neither_fleet_nor_readers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REHEARSAL, str(tmp_path)],
        env=check_environment(rehearse=True),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    found = {
        name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("versions", "waits")
    }
    assert {row["objective"] for row in found["waits"]["tables"][0]["rows"]} == {
        "dpo",
        "sft",
        "grpo",
    }
    assert all(row["fits"] for row in found["versions"]["tables"][1]["rows"])
