"""Diagnoses of a run from its metrics, as sentences with a remedy: nothing learned, nothing right, all cut.

Rules that compare one metric with one limit are lines of `limits.json`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from open_instruct.report.run_files import RunFiles
from open_instruct.run.run_directory import is_number
from open_instruct.wording import counted

# Steps below which a trend is chance.
FEW_STEPS = 10
PARTS_OF_TRAINING = ("time/data", "time/forward", "time/backward", "time/optimizer", "time/checkpoint")
PARTS_OF_ROLLOUTS = ("time/generate", "time/train", "time/sync")
# What is better where it is larger (1) or smaller (-1). The first of these that a run has is judged.
HELD_OUT = (
    ("eval/pass_at_1", 1, "share of held-out prompts that are answered right"),
    ("eval/preference_accuracy", 1, "accuracy on held-out pairs"),
    ("eval/accuracy", 1, "accuracy on held-out rows"),
    ("eval/loss", -1, "loss on held-out rows"),
)

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


bad, fair, good = (partial(Finding, level) for level in LEVELS)


def findings_of(run: RunFiles) -> list[Finding]:
    """All findings about a run, the worst first."""
    rules = (_place, _finite, _loss, _gradient, _preferences, _held_out, _limits, _reward, _memory)
    findings = [finding for rule in rules for finding in rule(run)]
    if not any(finding.level == "bad" for finding in findings) and len(run.rows) >= FEW_STEPS:
        findings.append(good("Nothing else in the numbers of this run speaks against it."))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def parts_of_step(run: RunFiles) -> dict[str, float]:
    """Mean seconds of a step by part, without the first step, which is slower than the others."""
    names = PARTS_OF_ROLLOUTS if run.numbers("reward") else PARTS_OF_TRAINING
    parts = {name.removeprefix("time/"): _mean_after_first(run, name) for name in names}
    parts["other"] = max(0.0, _mean_after_first(run, "time/step") - fsum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def planned_gib(run: RunFiles) -> float:
    """The planned memory of the largest phase; 0 without a plan."""
    return max((phase["total_bytes"] for phase in run.plan.get("phases", [])), default=0) / 2**30


@cache
def limits() -> Mapping[str, Mapping[str, dict[str, Any]]]:
    """Limits by name: of the last values of metrics, of how far metrics may fall, and of the parts of a step."""
    return json.loads(Path(__file__).with_name("limits.json").read_text(encoding="utf-8"))


def mean(values: list[float]) -> float:
    return fsum(values) / len(values) if values else 0.0


def _mean_after_first(run: RunFiles, name: str) -> float:
    values = run.numbers(name)
    return mean(values[1:] or values)


def _ends(run: RunFiles, name: str) -> tuple[float, float]:
    """Means over the first and over the last fifth of the steps."""
    values = run.numbers(name)
    size = max(1, len(values) // 5)
    return mean(values[:size]), mean(values[-size:])


def _place(run: RunFiles) -> Iterator[Finding]:
    if not run.rows:
        yield bad("No step was taken yet.", "run.log says where the run stands.")
    elif not run.has_ended:
        of = f" of {run.num_steps}" if run.num_steps else ""
        yield fair(
            f"The run has no exported model yet: its last step is {run.rows[-1]['step']:g}{of}.",
            "Where it has stopped, run.log ends with the reason, and the same command goes on from its "
            "newest checkpoint.",
        )


def _finite(run: RunFiles) -> Iterator[Finding]:
    for name in ("loss", "grad_norm"):
        steps = [row["step"] for row in run.rows if name in row and not is_number(row[name])]
        if steps:
            yield bad(
                f"{name} was not finite in {counted(len(steps), 'step')}, first in step {steps[0]:g}.",
                "Lower --learning_rate, or raise --warmup_ratio; look at the rows of that step.",
            )


def _loss(run: RunFiles) -> Iterator[Finding]:
    if run.numbers("reward") or len(run.numbers("loss")) < FEW_STEPS:
        return
    early, late = _ends(run, "loss")
    if late > early + 0.02 * abs(early):
        yield bad(f"The loss rose from {early:.4g} to {late:.4g}.", "Lower --learning_rate, or raise --warmup_ratio.")
    elif late > early - 0.005 * abs(early):
        yield bad(
            f"Nothing was learned: the loss stayed where it was ({early:.4g} to {late:.4g}).",
            "Raise --learning_rate or take more steps, and see that the rows hold what is to be learned.",
        )


def _gradient(run: RunFiles) -> Iterator[Finding]:
    rows = [row for row in run.rows if is_number(row.get("grad_norm"))]
    norms = [row["grad_norm"] for row in rows]
    for index in range(FEW_STEPS, len(rows)):
        usual = median(norms[index - FEW_STEPS : index])
        if norms[index] > 20 * usual > 0:
            yield fair(
                f"The gradient jumped: its norm was {norms[index]:.3g} in step {rows[index]['step']:g}, and "
                f"{usual:.3g} in those before.",
                "--optimizer skip_step_adamw leaves such steps out; --max_grad_norm bounds what one of them may do.",
            )
            return


def _preferences(run: RunFiles) -> Iterator[Finding]:
    if len(run.numbers("rewards/accuracy")) < FEW_STEPS:
        return
    names = ("accuracy", "margin", "chosen", "rejected")
    accuracy, margin, chosen, rejected = (_ends(run, f"rewards/{name}")[1] for name in names)
    if accuracy < 0.55:
        yield bad(
            f"Nothing was learned: {accuracy:.0%} of the last pairs are told apart, half would be by chance.",
            "Raise --learning_rate or take more steps; see that chosen and rejected are not exchanged.",
        )
    if chosen < -margin and rejected < 0 < margin:
        yield fair(
            f"Chosen replies became less likely too (reward {chosen:.3g}; rejected ones {rejected:.3g}).",
            "That is usual for DPO; where it goes too far, a lower --learning_rate or a higher --beta holds it.",
        )


def _held_out(run: RunFiles) -> Iterator[Finding]:
    for name, sign, what in HELD_OUT:
        rows = [row for row in run.evaluations if is_number(row.get(name))]
        if len(rows) < 2:
            continue
        first, last = rows[0][name], rows[-1][name]
        best_row = max(rows, key=lambda row: sign * row[name])
        best = best_row[name]
        if sign * last > sign * first:
            yield good(f"The {what} went from {first:.4g} to {last:.4g}.")
        else:
            yield bad(
                f"The {what} did not improve ({first:.4g} to {last:.4g}).",
                "Do not use this model as it is. Other rows, or another --learning_rate, may help.",
            )
        if sign * (best - last) > 0.05 * abs(best):
            yield fair(
                f"The {what} was best in step {best_row['step']:g} ({best:.4g}; {last:.4g} at the end).",
                "Take a checkpoint near that step, or train for fewer steps.",
            )
        return


def _limits(run: RunFiles) -> Iterator[Finding]:
    for name, limit in limits()["metrics"].items():
        value = _ends(run, name)[1]
        if value > limit["above"]:
            yield Finding(limit["level"], limit["text"].format(value), limit["remedy"])
    for name, limit in limits()["falls"].items():
        early, late = _ends(run, name)
        if late < limit["to"] * early and len(run.numbers(name)) >= limit["steps"]:
            yield Finding(limit["level"], limit["text"].format(early, late), limit["remedy"])
    parts = parts_of_step(run) if len(run.rows) >= FEW_STEPS else {}
    for name, limit in limits()["shares_of_a_step"].items():
        share = parts.get(name, 0.0) / (fsum(parts.values()) or 1.0)
        if share > limit["above"]:
            yield Finding(limit["level"], limit["text"].format(share), limit["remedy"])


def _reward(run: RunFiles) -> Iterator[Finding]:
    rewards = run.numbers("reward")
    if not rewards:
        return
    early, late = _ends(run, "reward")
    _, silent = _ends(run, "zero_std_fraction")
    if max(rewards) <= 0:
        yield bad(
            "Nothing was right: no step had any reward.",
            "Look at completions below, use easier prompts, or show the model some examples first (open-instruct sft).",
        )
    elif silent > 0.7:
        why = "nearly all answers are right: use harder prompts." if late > 0.8 else "use easier prompts."
        yield bad(
            f"{silent:.0%} of the last groups taught nothing: all their rewards are the same.",
            f"Raise --num_samples_per_prompt_rollout, or set --active_sampling; {why}",
        )
    elif len(rewards) >= 2 * FEW_STEPS and late - early < 0.02 * max(abs(early), abs(late)):
        yield bad(
            f"The reward is flat: {early:.3g} at the start, {late:.3g} at the end.",
            "Raise --learning_rate, or the groups with --num_samples_per_prompt_rollout; read some completions.",
        )
    elif late > early:
        yield good(f"The reward went from {early:.3g} to {late:.3g}.")


def _memory(run: RunFiles) -> Iterator[Finding]:
    measured = max(run.numbers("peak_memory_gib"), default=0.0)
    planned = planned_gib(run)
    limit = run.plan.get("memory_bytes", 0) / 2**30
    if measured > 0.95 * limit > 0:
        yield fair(
            f"Memory is nearly used up: {measured:.1f} of {limit:.1f} GiB.",
            "--activation_checkpointing full, or a smaller --per_device_train_batch_size, makes room.",
        )
    elif run.numbers("peak_reserved_gib") and measured > 1.15 * planned > 0:
        yield fair(f"More memory was used than planned: {measured:.1f} GiB, not {planned:.1f}.")
    if retries := max(run.numbers("allocation_retries/max"), default=0):
        yield fair(
            f"The allocator ran out of memory and tried again, {counted(int(retries), 'time')}.",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lessens fragmentation; smaller rows need less.",
        )
