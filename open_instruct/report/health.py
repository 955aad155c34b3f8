"""Diagnoses of a run from its metrics, each a sentence with a remedy.

The sentences are in `findings.json`, and so are the rules that compare one metric with one limit.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from open_instruct.core.metrics import metric_entry
from open_instruct.core.text import counted
from open_instruct.report.ends import mean_ends
from open_instruct.report.run_files import RunFiles
from open_instruct.run.run_directory import is_number

# Steps below which a trend is chance.
FEW_STEPS = 10
PARTS_OF_TRAINING = (
    "time/data",
    "time/forward",
    "time/backward",
    "time/optimizer",
    "time/checkpoint",
)
PARTS_OF_ROLLOUTS = ("time/generate", "time/train", "time/sync")
# Of the larger of two mean rewards: a smaller change is chance.
REWARD_CHANGE = 0.02
# The first of these that a run has is judged.
HELD_OUT = {
    "eval/pass_at_1": "share of held-out prompts that are answered right",
    "eval/preference_accuracy": "accuracy on held-out pairs",
    "eval/accuracy": "accuracy on held-out rows",
    "eval/loss": "loss on held-out rows",
}

Level = Literal["bad", "fair", "good"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about a run, how bad that is, and the remedy, if any is needed.

    Example: `Finding(level="bad", text="The reward did not rise.", remedy="Use easier prompts.")`.
    """

    level: Level
    text: str
    remedy: str = ""


def findings_of(run: RunFiles) -> list[Finding]:
    """All findings about a run, the worst first."""
    rules = (_place, _finite, _loss, _gradient, _preferences, _held_out, _limits, _reward, _memory)
    findings = [finding for rule in rules for finding in rule(run)]
    if _reward_rises(run):
        # What is wrong with a run that learns is worth a look, and no failure.
        findings = [
            replace(each, level="fair") if each.level == "bad" else each for each in findings
        ]
    if all(finding.level == "good" for finding in findings) and len(run.rows) >= FEW_STEPS:
        findings.append(_found("nothing_else"))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def parts_of_step(run: RunFiles) -> dict[str, float]:
    """Mean seconds of a step by part, without the first step, which is slower than the others."""
    names = PARTS_OF_ROLLOUTS if run.numbers("reward") else PARTS_OF_TRAINING
    parts = {name.removeprefix("time/"): _mean_after_first(run, name) for name in names}
    parts["other"] = max(0.0, _mean_after_first(run, "time/step") - fsum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def planned_bytes(run: RunFiles) -> float:
    """The planned memory of the largest phase; 0 without a plan."""
    return run.plan.peak_bytes if run.plan else 0


@cache
def _said() -> Mapping[str, Mapping[str, dict[str, Any]]]:
    """Levels and sentences by name: of this file's rules; and, with limits, of metrics that are too
    large, of those that may fall so far, and of the parts of a step.
    """
    return json.loads(Path(__file__).with_name("findings.json").read_text(encoding="utf-8"))


def _found(name: str, *values: object, kind: str = "rules") -> Finding:
    said = _said()[kind][name]
    return Finding(
        said["level"], said["text"].format(*values), said.get("remedy", "").format(*values)
    )


def mean(values: list[float]) -> float:
    return fsum(values) / len(values) if values else 0.0


def _mean_after_first(run: RunFiles, name: str) -> float:
    values = run.numbers(name)
    return mean(values[1:] or values)


def _ends(run: RunFiles, name: str) -> tuple[float, float]:
    """Means over the first and over the last fifth of the steps, as the headline has them."""
    return mean_ends(run.rows, name) or (0.0, 0.0)


def _reward_rises(run: RunFiles) -> bool:
    early, late = _ends(run, "reward")
    return late - early > REWARD_CHANGE * max(abs(early), abs(late))


def _place(run: RunFiles) -> Iterator[Finding]:
    if not run.rows:
        yield _found("no_step")
    elif not run.has_ended:
        of = f" of {run.num_steps}" if run.num_steps else ""
        yield _found("not_ended", run.rows[-1]["step"], of)


def _finite(run: RunFiles) -> Iterator[Finding]:
    for name in ("loss", "grad_norm"):
        steps = [row["step"] for row in run.rows if name in row and not is_number(row[name])]
        if steps:
            yield _found("not_finite", name, counted(len(steps), "step"), steps[0])


def _loss(run: RunFiles) -> Iterator[Finding]:
    if run.numbers("reward") or len(run.numbers("loss")) < FEW_STEPS:
        return
    early, late = _ends(run, "loss")
    if late > early + 0.02 * abs(early):
        yield _found("loss_rose", early, late)
    elif late > early - 0.005 * abs(early):
        yield _found("loss_stayed", early, late)


def _gradient(run: RunFiles) -> Iterator[Finding]:
    rows = [row for row in run.rows if is_number(row.get("grad_norm"))]
    norms = [row["grad_norm"] for row in rows]
    for index in range(FEW_STEPS, len(rows)):
        usual = median(norms[index - FEW_STEPS : index])
        if norms[index] > 20 * usual > 0:
            yield _found("gradient_jumped", norms[index], rows[index]["step"], usual)
            return


def _preferences(run: RunFiles) -> Iterator[Finding]:
    if len(run.numbers("rewards/accuracy")) < FEW_STEPS:
        return
    names = ("accuracy", "margin", "chosen", "rejected")
    accuracy, margin, chosen, rejected = (_ends(run, f"rewards/{name}")[1] for name in names)
    if accuracy < 0.55:
        yield _found("pairs_not_told_apart", accuracy)
    if chosen < -margin and rejected < 0 < margin:
        yield _found("chosen_less_likely", chosen, rejected)


def _held_out(run: RunFiles) -> Iterator[Finding]:
    for name, what in HELD_OUT.items():
        sign = 1 if metric_entry(name).better == "higher" else -1
        rows = [row for row in run.evaluations if is_number(row.get(name))]
        if len(rows) < 2:
            continue
        first, last = rows[0][name], rows[-1][name]
        best_row = max(rows, key=lambda row: sign * row[name])
        best = best_row[name]
        is_better = sign * last > sign * first
        yield _found("held_out_better" if is_better else "held_out_not_better", what, first, last)
        if sign * (best - last) > 0.05 * abs(best):
            # The start model has no checkpoint.
            is_kept = run.config.get("keep_best") == name and best_row["step"] > 0
            found = "held_out_best_kept" if is_kept else "held_out_best_before"
            yield _found(found, what, best_row["step"], best, last, name)
        return


def _limits(run: RunFiles) -> Iterator[Finding]:
    for name, limit in _said()["metrics"].items():
        value = _ends(run, name)[1]
        if value > limit["above"]:
            yield _found(name, value, kind="metrics")
    for name, limit in _said()["falls"].items():
        early, late = _ends(run, name)
        if late < limit["to"] * early and len(run.numbers(name)) >= limit["steps"]:
            yield _found(name, early, late, kind="falls")
    parts = parts_of_step(run) if len(run.rows) >= FEW_STEPS else {}
    for name, limit in _said()["shares_of_a_step"].items():
        share = parts.get(name, 0.0) / (fsum(parts.values()) or 1.0)
        if share > limit["above"]:
            yield _found(name, share, kind="shares_of_a_step")


def _reward(run: RunFiles) -> Iterator[Finding]:
    rewards = run.numbers("reward")
    if not rewards:
        return
    early, late = _ends(run, "reward")
    _, silent = _ends(run, "zero_std_fraction")
    least = REWARD_CHANGE * max(abs(early), abs(late))
    if late - early > least:
        yield _found("reward_rose", early, late)
    if max(rewards) <= 0:
        yield _found("no_reward")
    elif silent > 0.7:
        yield _found("silent_groups_all_right" if late > 0.8 else "silent_groups", silent)
    elif len(rewards) >= 2 * FEW_STEPS and early - late > least:
        yield _found("reward_fell", early, late)
    elif len(rewards) >= 2 * FEW_STEPS and late - early <= least:
        yield _found("reward_flat", early, late)


def _memory(run: RunFiles) -> Iterator[Finding]:
    measured = max(run.numbers("peak_memory_gib"), default=0.0)
    planned = planned_bytes(run) / 2**30
    limit = run.plan.memory_bytes / 2**30 if run.plan else 0
    if measured > 0.95 * limit > 0:
        yield _found("memory_nearly_full", measured, limit)
    elif run.numbers("peak_reserved_gib") and measured > 1.15 * planned > 0:
        yield _found("memory_not_planned", measured, planned)
    if retries := max(run.numbers("allocation_retries/max"), default=0):
        yield _found("allocator_retried", counted(int(retries), "time"))
