"""A step that is taken again gives what the run recorded, whatever the run's layout was, and leaves
the run alone.
"""

import hashlib
import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import commands_of
from tests.ranks import programs
from tests.ranks.grpo_case import GRPOCase
from tests.ranks.launch import REPOSITORY, run_ranks
from tests.ranks.train_case import free_ports
from tests.waiting import HANGS_AFTER_S

pytestmark = pytest.mark.extended

RUN, REPLAY = "tests.ranks.jobs.replayed_run:run_it", "tests.ranks.jobs.replayed_run:replay_each"
NUM_STEPS = 3
FLAGS: dict[str, Any] = {
    "num_unique_prompts_rollout": 4,
    "num_samples_per_prompt_rollout": 3,
    "total_episodes": 12 * NUM_STEPS,
    "learning_rate": 1e-3,
    "warmup_ratio": 0.5,
    "save_traces": True,
}
MOVING = {
    "beta": 0.05,
    "ref_policy_update_freq": 1,
    "alpha": 0.5,
    "num_mini_batches": 2,
    "num_epochs": 2,
    "loss_fn": "grpo",
    "optimizer": "skip_step_adamw",
}
ON_TWO = {"num_learners_per_node": 2}
OF_ZERO = {
    "backend": "deepspeed",
    "deepspeed_stage": 2,
    "beta": 0.05,
    "num_mini_batches": 2,
    "loss_fn": "grpo",
}
OTHER = [
    "--loss_fn",
    "gspo",
    "--beta",
    "0.05",
    "--no_filter_zero_std_samples",
    "--pack_length",
    "48",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """A run of one process, one of two ranks, and what replays of their steps wrote and printed, by
    name.
    """

    plain: Path
    was_left_alone: bool
    reports: dict[str, dict[str, Any]]
    printed: dict[str, str]


@pytest.fixture(scope="module")
def replays(grpo_case: GRPOCase, tmp_path_factory: pytest.TempPathFactory) -> Replays:
    plain = run_of(grpo_case, "plain")
    # Several updates a step, so that the optimizer's state counts, and a reference policy that is
    # in the checkpoints.
    moving = run_of(grpo_case, "moving", **(ON_TWO | MOVING))
    zero = run_of(grpo_case, "zero", **(ON_TWO | OF_ZERO))
    without_step2 = grpo_case.folder / "without_step2"
    shutil.copytree(plain, without_step2, ignore=lambda folder, names: {"step2"} & set(names))
    before = files_of(plain)
    commands: dict[str, list[Any]] = {
        "first": [plain, "--step", 1],
        "second": [plain, "--step", 2],
        "moving": [moving, "--step", 3],
        "zero": [zero, "--step", 3, "--loss_fn", "gspo"],
        "other": [plain, "--step", 2, *OTHER],
        "older": [without_step2, "--step", 3],
        "given": [moving, "--step", 2, "--weights", grpo_case.model],
    }
    out = tmp_path_factory.mktemp("reports")
    words = [[*map(str, command), "--json", str(out / name)] for name, command in commands.items()]
    (printed,) = run_ranks(1, REPLAY, commands=words, ports=free_ports(len(words)))
    return Replays(
        plain=plain,
        was_left_alone=files_of(plain) == before and "traces/step2.parquet" in before,
        reports={name: json.loads((out / name).read_text()) for name in commands},
        printed=dict(zip(commands, printed, strict=True)),
    )


def run_of(grpo_case: GRPOCase, name: str, **flags: Any) -> Path:
    case = grpo_case.case(name, flags=FLAGS | flags)
    run_ranks(flags.get("num_learners_per_node", 1), RUN, flags=case["flags"], num_steps=NUM_STEPS)
    return grpo_case.folder / name


def files_of(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_step(report: dict[str, Any], *, loss_abs: float = 1e-8) -> None:
    recorded, recomputed = report["recorded"], report["recomputed"]
    assert recorded["grad_norm"] > 1e-3
    for name in ("loss", "policy_loss"):
        assert recomputed[name] == pytest.approx(recorded[name], rel=1e-5, abs=loss_abs), name
    assert recomputed["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-5)
    for name in recomputed:
        assert recomputed[name] == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(("name", "step"), [("first", 1), ("second", 2)])
def test_runs_own_settings_give_the_recorded_numbers(
    replays: Replays, name: str, step: int
) -> None:
    report, printed = replays.reports[name], replays.printed[name]
    assert report["recorded"] == json.loads(
        (replays.plain / "metrics.jsonl").read_text().splitlines()[step - 1]
    )
    assert_same_step(report)
    assert report["recomputed"]["num_trained_completions"] == 9
    assert (
        report["weights"]["are_the_steps_own"]
        and report["changes"] == {}
        and report["changed"] is None
    )
    assert report["weights"]["checkpoint"] == (None if step == 1 else str(replays.plain / "step1"))
    assert "recorded and recomputed differ by" in printed
    loss = next(line.split() for line in printed.splitlines() if line.startswith("loss "))
    assert loss[1:] == [f"{report[column]['loss']:.6g}" for column in ("recorded", "recomputed")]


def test_run_of_two_ranks_with_optimizer_and_reference_in_its_checkpoints(replays: Replays) -> None:
    report = replays.reports["moving"]
    # Ranks add up in another order, and in the loss advantages of both signs nearly cancel.
    assert_same_step(report, loss_abs=1e-7)
    assert report["recorded"]["kl"] > 1e-4


def test_run_on_deepspeed_is_replayed_on_it(replays: Replays) -> None:
    """From its own checkpoints, and under another loss in the same process."""
    report = replays.reports["zero"]
    assert report["weights"]["are_the_steps_own"]
    assert_same_step(report, loss_abs=1e-7)
    assert report["recorded"]["kl"] > 1e-6
    assert report["changed"]["grad_norm"] != pytest.approx(
        report["recomputed"]["grad_norm"], rel=1e-3
    )


def test_replay_with_another_loss_gives_other_numbers_and_leaves_the_run_alone(
    replays: Replays,
) -> None:
    assert replays.was_left_alone
    report = replays.reports["other"]
    assert_same_step(report)
    changed, recomputed = report["changed"], report["recomputed"]
    assert report["changes"]["loss_fn"] == {"from": "dapo", "to": "gspo"}
    for name in ("policy_loss", "grad_norm"):
        assert changed[name] != pytest.approx(recomputed[name], rel=1e-3)
    # The start model is the reference, and step 2 has left it.
    assert changed["kl"] > 1e-6 and "kl" not in recomputed
    assert (recomputed["num_trained_completions"], changed["num_trained_completions"]) == (9, 12)
    assert "changed: --loss_fn gspo (was dapo), --beta 0.05 (was 0.0)" in replays.printed["other"]


def test_older_weights_are_said_to_be_older(replays: Replays) -> None:
    report, printed = replays.reports["older"], " ".join(replays.printed["older"].split())
    assert not report["weights"]["are_the_steps_own"] and report["weights"]["checkpoint"].endswith(
        "without_step2/step1"
    )
    assert (
        "the weights are those after step 1," in printed
        and "step 3 began with those of step 2" in printed
    )
    assert "recorded and recomputed" not in printed
    assert report["recomputed"]["loss"] != pytest.approx(report["recorded"]["loss"], rel=1e-5)


def test_given_weights_are_taken_as_they_are(replays: Replays, grpo_case: GRPOCase) -> None:
    report, printed = replays.reports["given"], replays.printed["given"]
    weights = report["weights"]
    assert (
        weights["model"] == str(grpo_case.model)
        and weights["checkpoint"] is None
        and not weights["are_the_steps_own"]
    )
    assert "fresh optimizer" in printed and "the reference policy is the start model" in printed
    assert report["recomputed"]["grad_norm"] != pytest.approx(
        report["recorded"]["grad_norm"], rel=1e-3
    )
    assert report["recomputed"]["lr"] == pytest.approx(report["recorded"]["lr"])


def test_command_prints_what_the_function_returns(replays: Replays) -> None:
    said = said_by(["replay", str(replays.plain), "--step", "9"], exit_code=2)
    assert "step9.parquet does not exist" in said and "there are traces of steps 1, 2, 3" in said


def test_command_of_the_docs_runs(replays: Replays, tmp_path: Path) -> None:
    """It says of these runs what the page shows of others."""
    page = REPOSITORY / "docs" / "replay.md"
    program, *words = next(commands_of(page)).split()
    assert program == "open-instruct"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(replays.plain)
    said = said_by(words, exit_code=0, cwd=tmp_path)
    shown = (
        page.read_text().partition(f"$ open-instruct {shlex.join(words)}\n")[2].partition("```")[0]
    )
    head, _, table = shown.partition("\n\n")
    assert head and said.startswith(f"{head}\n\n")
    columns = table.splitlines()[0].split()
    assert columns == ["recorded", "recomputed", "changed"] == said[len(head) :].split()[:3]
    assert shown.splitlines()[-1].partition(" by ")[0] in said
    report = replays.reports["second"]
    loss = next(line.split() for line in said.splitlines() if line.startswith("loss "))
    assert loss[1:3] == [f"{report[column]['loss']:.6g}" for column in ("recorded", "recomputed")]
    assert loss[3] != loss[2]


def said_by(words: list[str], *, exit_code: int, cwd: Path = REPOSITORY) -> str:
    process = programs.start([str(REPOSITORY / "open_instruct" / "cli.py"), *words], cwd=cwd)
    said, _ = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode == exit_code
    return said
