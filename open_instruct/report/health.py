"""Diagnoses of a run from its metrics, each a sentence with a remedy.

The sentences are in `findings.json`, and so are the rules that compare one metric with one limit.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from open_instruct.core.metrics import metric_entry
from open_instruct.core.text import spell_count
from open_instruct.planning.subject.units import GIB
from open_instruct.report.ends import mean_ends
from open_instruct.report.run_files import RunFiles
from open_instruct.run.run_directory import is_number

# Steps below which a trend is chance.
FEW_STEPS = 10
TRAINING_PARTS = (
    "time/data",
    "time/forward",
    "time/backward",
    "time/optimizer",
    "time/checkpoint",
)
ROLLOUT_PARTS = ("time/generate", "time/train", "time/sync", "time/switch")
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


def diagnose(run: RunFiles) -> list[Finding]:
    """All findings about a run, the worst first."""
    rules = (
        _check_progress,
        _check_finite,
        _check_loss,
        _check_gradient,
        _check_preferences,
        _check_held_out,
        _check_limits,
        _check_reward,
        _check_memory,
    )
    findings = list(chain.from_iterable(rule(run) for rule in rules))
    if _reward_rises(run):
        # What is wrong with a run that learns is worth a look, and no failure.
        findings = [_soften(finding) for finding in findings]
    if all(finding.level == "good" for finding in findings) and len(run.rows) >= FEW_STEPS:
        findings.append(_find("nothing_else"))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _soften(finding: Finding) -> Finding:
    """The finding, no longer as a failure."""
    if finding.level != "bad":
        return finding
    return replace(finding, level="fair")


def mean_seconds_by_part(run: RunFiles) -> dict[str, float]:
    """Mean seconds of a step by part, without the first step, which is slower than the others."""
    names = ROLLOUT_PARTS if run.numbers("reward") else TRAINING_PARTS
    parts = {name.removeprefix("time/"): mean_after_first(run, name) for name in names}
    parts["other"] = max(0.0, mean_after_first(run, "time/step") - fsum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def find_planned_bytes(run: RunFiles) -> float:
    """The planned memory of the largest phase; 0 without a plan."""
    if run.plan is None:
        return 0
    return run.plan.peak_bytes


@cache
def _read_sentences() -> Mapping[str, Mapping[str, dict[str, Any]]]:
    """Levels and sentences by their kind and name.

    The kind `rules` is of this file's rules. The others have limits: `metrics` that may be too
    large, `falls` of metrics, and `shares_of_a_step`.
    """
    return json.loads(Path(__file__).with_name("findings.json").read_text(encoding="utf-8"))


def _find(name: str, *values: object, kind: str = "rules") -> Finding:
    sentence = _read_sentences()[kind][name]
    text = sentence["text"].format(*values)
    remedy = sentence.get("remedy", "").format(*values)
    return Finding(sentence["level"], text, remedy)


def mean_after_first(run: RunFiles, name: str) -> float:
    """The mean of a metric without the first step; 0 where there is none."""
    numbers = run.numbers(name)
    if not numbers:
        return 0.0
    later = numbers[1:] or numbers
    return fsum(later) / len(later)


def _mean_ends(run: RunFiles, name: str) -> tuple[float, float]:
    """Means over the first and over the last fifth of the steps, as the headline has them."""
    return mean_ends(run.rows, name) or (0.0, 0.0)


def _reward_rises(run: RunFiles) -> bool:
    early, late = _mean_ends(run, "reward")
    return late - early > REWARD_CHANGE * max(abs(early), abs(late))


def _check_progress(run: RunFiles) -> Iterator[Finding]:
    if not run.rows:
        yield _find("no_step")
    elif not run.has_ended:
        of_all = f" of {run.num_steps}" if run.num_steps else ""
        yield _find("not_ended", run.rows[-1]["step"], of_all)


def _check_finite(run: RunFiles) -> Iterator[Finding]:
    for name in ("loss", "grad_norm"):
        steps = [row["step"] for row in run.rows if name in row and not is_number(row[name])]
        if steps:
            yield _find("not_finite", name, spell_count(len(steps), "step"), steps[0])


def _check_loss(run: RunFiles) -> Iterator[Finding]:
    if run.numbers("reward") or len(run.numbers("loss")) < FEW_STEPS:
        return
    early, late = _mean_ends(run, "loss")
    if late > early + 0.02 * abs(early):
        yield _find("loss_rose", early, late)
    elif late > early - 0.005 * abs(early):
        yield _find("loss_stayed", early, late)


def _check_gradient(run: RunFiles) -> Iterator[Finding]:
    rows = [row for row in run.rows if is_number(row.get("grad_norm"))]
    norms = [row["grad_norm"] for row in rows]
    for index in range(FEW_STEPS, len(rows)):
        usual = median(norms[index - FEW_STEPS : index])
        if norms[index] > 20 * usual > 0:
            yield _find("gradient_jumped", norms[index], rows[index]["step"], usual)
            return


def _check_preferences(run: RunFiles) -> Iterator[Finding]:
    if len(run.numbers("rewards/accuracy")) < FEW_STEPS:
        return
    _, accuracy = _mean_ends(run, "rewards/accuracy")
    _, margin = _mean_ends(run, "rewards/margin")
    _, chosen_reward = _mean_ends(run, "rewards/chosen")
    _, rejected = _mean_ends(run, "rewards/rejected")
    if accuracy < 0.55:
        yield _find("pairs_not_told_apart", accuracy)
    if chosen_reward < -margin and rejected < 0 < margin:
        yield _find("chosen_less_likely", chosen_reward, rejected)


def _check_held_out(run: RunFiles) -> Iterator[Finding]:
    for name in HELD_OUT:
        rows = [row for row in run.evaluations if is_number(row.get(name))]
        if len(rows) >= 2:
            keeps_best = run.config.get("keep_best") == name
            yield from _compare_evaluations(rows, name, keeps_best=keeps_best)
            return


def _compare_evaluations(
    rows: list[dict[str, Any]], name: str, *, keeps_best: bool
) -> Iterator[Finding]:
    """Compare the last evaluation with the first, and with the best one before it."""
    sign = 1 if metric_entry(name).better == "higher" else -1
    what = HELD_OUT[name]
    first = rows[0][name]
    last = rows[-1][name]
    if sign * last > sign * first:
        yield _find("held_out_better", what, first, last)
    else:
        yield _find("held_out_not_better", what, first, last)
    best_row = max(rows, key=lambda row: sign * row[name])
    best = best_row[name]
    if sign * (best - last) <= 0.05 * abs(best):
        return
    # The start model has no checkpoint.
    if keeps_best and best_row["step"] > 0:
        yield _find("held_out_best_kept", what, best_row["step"], best, last, name)
    else:
        yield _find("held_out_best_before", what, best_row["step"], best, last, name)


def _check_limits(run: RunFiles) -> Iterator[Finding]:
    for name, limit in _read_sentences()["metrics"].items():
        value = _mean_ends(run, name)[1]
        if value > limit["above"]:
            yield _find(name, value, kind="metrics")
    for name, limit in _read_sentences()["falls"].items():
        early, late = _mean_ends(run, name)
        if late < limit["to"] * early and len(run.numbers(name)) >= limit["steps"]:
            yield _find(name, early, late, kind="falls")
    if len(run.rows) < FEW_STEPS:
        return
    parts = mean_seconds_by_part(run)
    for name, limit in _read_sentences()["shares_of_a_step"].items():
        share = parts.get(name, 0.0) / (fsum(parts.values()) or 1.0)
        if share > limit["above"]:
            yield _find(name, share, kind="shares_of_a_step")


def _check_reward(run: RunFiles) -> Iterator[Finding]:
    rewards = run.numbers("reward")
    if not rewards:
        return
    early, late = _mean_ends(run, "reward")
    _, silent = _mean_ends(run, "zero_std_fraction")
    least = REWARD_CHANGE * max(abs(early), abs(late))
    if late - early > least:
        yield _find("reward_rose", early, late)
    if max(rewards) <= 0:
        yield _find("no_reward")
    elif silent > 0.7:
        if late > 0.8:
            yield _find("silent_groups_all_right", silent)
        else:
            yield _find("silent_groups", silent)
    elif len(rewards) >= 2 * FEW_STEPS and early - late > least:
        yield _find("reward_fell", early, late)
    elif len(rewards) >= 2 * FEW_STEPS and late - early <= least:
        yield _find("reward_flat", early, late)


def _check_memory(run: RunFiles) -> Iterator[Finding]:
    measured_gib = max(run.numbers("peak_memory_gib"), default=0.0)
    planned_gib = find_planned_bytes(run) / GIB
    limit = run.plan.memory_bytes / GIB if run.plan else 0
    if measured_gib > 0.95 * limit > 0:
        yield _find("memory_nearly_full", measured_gib, limit)
    elif run.numbers("peak_reserved_gib") and measured_gib > 1.15 * planned_gib > 0:
        yield _find("memory_not_planned", measured_gib, planned_gib)
    retries = max(run.numbers("allocation_retries/max"), default=0)
    if retries:
        yield _find("allocator_retried", spell_count(int(retries), "time"))
