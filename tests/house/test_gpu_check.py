"""benchmarks/gpu_check: its report, whatever becomes of a check, and what is counted; cheap checks are rehearsed."""

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
from gpu_check.listed import CHECKS, Check  # noqa: E402
from gpu_check.page import html_page, shown  # noqa: E402
from gpu_check.runner import check_environment  # noqa: E402

FOUND = {"headline": "9 < 10", "failures": [], "notes": ["a note"], "tables": [{"title": "T", "rows": [{"a": 1.25}]}]}
# By its name: what a check does.
BEHAVIOUR = {
    "good": f"import sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps(FOUND))})",
    "broken": "print('<last> words'); raise SystemExit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "hanging": "import os, time; print('begun', flush=True); os.fork(); time.sleep(60)",
}


def fake_command(check: Check, result: Path, work: Path) -> Sequence[str]:
    return [sys.executable, "-S", "-c", BEHAVIOUR[check.name], str(result)]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check(name=name, title=name.upper(), limit_s=0.6 if name == "hanging" else 30.0) for name in BEHAVIOUR]
    monkeypatch.setattr(program, "CHECKS", checks)
    monkeypatch.setattr(program, "check_command", lambda rehearse: fake_command)
    monkeypatch.setattr(program, "NEEDED", ("json",))
    monkeypatch.setattr(program, "TIMES_SLOWER", 1.0)


@pytest.mark.usefixtures("faked")
class TestReport:
    def test_one_that_fails_or_hangs_leaves_the_others(self, tmp_path: Path) -> None:
        assert program.main(["--rehearse", "--out", str(tmp_path)]) == 1
        report = json.loads((tmp_path / "gpu_check.json").read_text())
        assert report["is_rehearsal"]
        good, broken, killed, hanging = report["checks"]
        assert (good["state"], good["headline"], good["tables"]) == ("passed", "9 < 10", FOUND["tables"])
        assert (broken["state"], broken["why"]) == ("failed", ["ended with code 3"])
        assert broken["last_lines"] == ["<last> words"]
        assert killed["why"] == ["ended by SIGKILL"]
        assert hanging["why"] == ["not done after 1 s"]
        assert hanging["last_lines"] == ["begun"]
        page = (tmp_path / "gpu_check.html").read_text()
        assert "proves nothing about a GPU" in page
        assert "&lt;last&gt; words" in page and "9 &lt; 10" in page
        assert "src=" not in page and "http" not in page  # nothing is fetched
        assert "<last> words" in (tmp_path / "gpu_check.log").read_text()

    def test_all_is_well(self, tmp_path: Path) -> None:
        assert program.main(["--rehearse", "--out", str(tmp_path), "--only", "good"]) == 0
        states = [check["state"] for check in json.loads((tmp_path / "gpu_check.json").read_text())["checks"]]
        assert states == ["passed", "not run", "not run", "not run"]

    def test_without_time_the_rest_is_not_run(self, tmp_path: Path) -> None:
        assert program.main(["--rehearse", "--out", str(tmp_path), "--limit_s", "0"]) == 0
        checks = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
        assert {check["state"] for check in checks} == {"not run"}

    def test_without_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setattr(program, "has_gpu", lambda: False)
        assert program.main(["--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "no CUDA device" in line
        assert not (tmp_path / "out").exists()

    def test_a_missing_package_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "needy_package.py").write_text("import package_that_is_nowhere")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(program, "NEEDED", ("needy_package",))
        assert program.main(["--rehearse"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "package_that_is_nowhere, which needy_package needs, is missing" in line


def test_a_page_of_a_run_that_goes_on_says_so() -> None:
    report = {"began": "now", "is_rehearsal": False, "checks": []}
    page = html_page(report)
    assert f"{len(CHECKS)} checks are still to come" in page
    assert 'class="rehearsal"' not in page


def test_figures_are_shown_with_the_digits_that_count() -> None:
    figures = (None, True, 12345, 0.123456, 1234.5, "as it is")
    assert [shown(figure) for figure in figures] == ["", "yes", "12,345", "0.1235", "1,234", "as it is"]


def test_every_check_is_there_and_none_takes_the_time_of_another() -> None:
    folder = REPOSITORY / "benchmarks" / "gpu_check" / "checks"
    assert {check.name for check in CHECKS} == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert sum(check.limit_s for check in CHECKS) <= program.LIMIT_S == 600


@pytest.mark.parametrize(
    ("planned", "is_near", "is_near_as_a_bound"),
    [(9.4, False, False), (9.6, True, True), (10.4, True, True), (10.6, False, True), (30.0, False, True)],
)
def test_a_plan_is_five_percent_off_at_most(planned: float, is_near: bool, is_near_as_a_bound: bool) -> None:
    """What a compiler fuses is counted as if it were not, so its plan is a bound."""
    from gpu_check.checks import throughput

    assert throughput.is_near(planned, 10.0, is_bound=False) == is_near
    assert throughput.is_near(planned, 10.0, is_bound=True) == is_near_as_a_bound


def test_a_run_whose_plan_is_off_fails_its_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpu_check.checks import throughput
    from gpu_check.findings import Findings

    planned = iter((10.6, 13.0, 13.0, 9.4))

    def pretended(words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        figures = {"planned, GiB": next(planned), "allocated, GiB": 10.0, "MFU": 0.3, "tokens/s": 1.0}
        Path(words[words.index("--json") + 1]).write_text(json.dumps(figures))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(throughput.subprocess, "run", pretended)
    throughput.check(findings := Findings(file=tmp_path / "found.json"), tmp_path, rehearse=False)
    assert [told.partition(":")[0] for told in findings.failures] == ["uncompiled", "uncompiled, blocks recomputed"]


def test_host_waits_are_counted_by_line() -> None:
    import torch
    from gpu_check.host_waits import WARNED, counted_host_waits

    with counted_host_waits(on_cuda=False) as waits:
        for _ in range(2):
            warnings.warn(f"called a {WARNED}", stacklevel=1)
        with pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)
        # There is no CUDA here, in torch or under it; that it was asked for is seen all the same.
        with pytest.raises((AssertionError, RuntimeError)):
            torch.cuda.synchronize()
    assert sorted(waits.values()) == [1, 2]
    (where,) = (where for where, count in waits.items() if count == 2)
    assert where.startswith(__file__)


def test_a_wait_is_laid_to_the_line_of_the_package_that_asked() -> None:
    from gpu_check.host_waits import WARNED, counted_host_waits

    from open_instruct.losses import kl

    def waiting(*_: object) -> None:
        warnings.warn(WARNED, stacklevel=1)

    with counted_host_waits(on_cuda=False) as waits:
        exec(compile("\n" * 9 + "waiting()", kl.__file__, "exec"), {"waiting": waiting})
    assert list(waits) == [
        f"open_instruct/losses/kl.py:10 in <module>: {Path(kl.__file__).read_text().splitlines()[9].strip()}"
    ]


def test_pairs_that_see_each_other() -> None:
    from gpu_check.checks.attention_speed import Row

    # A root of 3: 1 + 2 + 3. A branch of 2 behind it: 4 + 5.
    assert Row(title="", lengths=(3, 2), prefix_lengths=(0, 3)).num_pairs() == 15
    # With a window of two tokens: 1 + 2 + 2, and 2 + 2.
    assert Row(title="", lengths=(3, 2), prefix_lengths=(0, 3), left=1).num_pairs() == 9


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
def test_a_driver_that_is_too_old_is_told(driver: str | None, cuda: str | None, is_bad: bool) -> None:
    from gpu_check.checks.versions import driver_problem

    assert (driver_problem(driver, cuda) is not None) == is_bad


REHEARSAL = """
import sys
from pathlib import Path
from gpu_check import one
folder = Path(sys.argv[1])
for name in ("versions", "attention_speed", "waits"):
    (folder / name).mkdir()
    sys.argv[1:] = [name, "--result", str(folder / f"{name}.json"), "--work", str(folder / name), "--rehearse"]
    assert one.main() == 0, name
print(sorted({"ray", "vllm", "datasets", "pyarrow", "pandas"} & set(sys.modules)))
"""


@pytest.mark.slow
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
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("versions", "waits")}
    assert {row["objective"] for row in found["waits"]["tables"][0]["rows"]} == {"dpo", "sft", "grpo"}
    assert all(row["fits"] for row in found["versions"]["tables"][1]["rows"])
