"""What the numbers of a run say in sentences, each with what to do: nothing learned, nothing right, all cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import fsum
from statistics import median
from typing import Literal, get_args

from open_instruct.report.run_files import RunFiles
from open_instruct.run.run_directory import is_number
from open_instruct.wording import counted

# Steps below which a trend is chance.
FEW_STEPS = 10
PARTS_OF_TRAINING = ("time/data", "time/forward", "time/backward", "time/optimizer", "time/checkpoint")
PARTS_OF_ROLLOUTS = ("time/generate", "time/train", "time/sync")


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
    """The worst first."""
    findings = [finding for rule in RULES for finding in rule(run)]
    if not any(finding.level == "bad" for finding in findings) and len(run.rows) >= FEW_STEPS:
        findings.append(good("Nothing else in the numbers of this run speaks against it."))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def parts_of_step(run: RunFiles) -> dict[str, float]:
    """Mean seconds of a step, by what they went to; the first step, which pays for what others find ready, left out."""
    names = PARTS_OF_ROLLOUTS if _has(run, "reward") else PARTS_OF_TRAINING
    parts = {name.removeprefix("time/"): mean(run.numbers(name)[1:] or run.numbers(name)) for name in names}
    whole = mean(run.numbers("time/step")[1:] or run.numbers("time/step"))
    parts["other"] = max(0.0, whole - fsum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def mean(values: list[float]) -> float:
    return fsum(values) / len(values) if values else 0.0


def _early(run: RunFiles, name: str) -> float:
    """Mean over the first fifth of the steps."""
    values = run.numbers(name)
    return mean(values[: max(1, len(values) // 5)])


def _late(run: RunFiles, name: str) -> float:
    values = run.numbers(name)
    return mean(values[-max(1, len(values) // 5) :])


def _has(run: RunFiles, name: str, *, steps: int = 1) -> bool:
    return len(run.numbers(name)) >= steps


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
    if _has(run, "reward") or not _has(run, "loss", steps=FEW_STEPS):
        return
    early, late = _early(run, "loss"), _late(run, "loss")
    if late > early + 0.02 * abs(early):
        yield bad(f"The loss rose from {early:.4g} to {late:.4g}.", "Lower --learning_rate, or raise --warmup_ratio.")
    elif late > early - 0.005 * abs(early):
        yield bad(
            f"Nothing was learned: the loss stayed where it was ({early:.4g} to {late:.4g}).",
            "Raise --learning_rate or take more steps, and see that the rows hold what is to be learned.",
        )


def _gradient(run: RunFiles) -> Iterator[Finding]:
    norms = [(row["grad_norm"], row["step"]) for row in run.rows if is_number(row.get("grad_norm"))]
    for index in range(FEW_STEPS, len(norms)):
        (norm, step), usual = norms[index], median(each for each, _ in norms[index - FEW_STEPS : index])
        if norm > 20 * usual > 0:
            yield fair(
                f"The gradient jumped: its norm was {norm:.3g} in step {step:g}, and {usual:.3g} in those before.",
                "--optimizer skip_step_adamw leaves such steps out; --max_grad_norm bounds what one of them may do.",
            )
            break
    if share := _late(run, "step_skipped"):
        yield fair(f"{share:.0%} of the last steps were skipped.", "Lower --learning_rate.")


def _preferences(run: RunFiles) -> Iterator[Finding]:
    if not _has(run, "rewards/accuracy", steps=FEW_STEPS):
        return
    accuracy, margin = _late(run, "rewards/accuracy"), _late(run, "rewards/margin")
    chosen, rejected = _late(run, "rewards/chosen"), _late(run, "rewards/rejected")
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
    for name, sign, what in (
        ("eval/pass_at_1", 1, "share of held-out prompts that are answered right"),
        ("eval/preference_accuracy", 1, "accuracy on held-out pairs"),
        ("eval/accuracy", 1, "accuracy on held-out rows"),
        ("eval/loss", -1, "loss on held-out rows"),
    ):
        scores = [(row[name], row["step"]) for row in run.evaluations if is_number(row.get(name))]
        if len(scores) < 2:
            continue
        (first, _), (last, _) = scores[0], scores[-1]
        best, step = max(scores, key=lambda score: sign * score[0])
        if sign * last > sign * first:
            text = f"The {what} went from {first:.4g} to {last:.4g}."
            yield good(text)
        else:
            text, remedy = f"The {what} did not improve ({first:.4g} to {last:.4g}).", "Do not use this model as it is."
            yield bad(text, f"{remedy} Other rows, or another --learning_rate, may help.")
        if sign * (best - last) > 0.05 * abs(best) and step != scores[-1][1]:
            yield fair(
                f"The {what} was best in step {step:g} ({best:.4g}; {last:.4g} at the end).",
                "Take a checkpoint near that step, or train for fewer steps.",
            )
        return


def _reward(run: RunFiles) -> Iterator[Finding]:
    if not _has(run, "reward"):
        return
    early, late, silent = (_early(run, "reward"), _late(run, "reward"), _late(run, "zero_std_fraction"))
    cut, problems = _late(run, "truncated_fraction"), _late(run, "num_verifier_problems")
    if problems:
        yield bad(
            f"Verifiers failed for {problems:.3g} answers of a step, which count as wrong.",
            "run.log has the first traceback; --verifier_timeout_s gives slow verifiers more time.",
        )
    if cut > 0.5:
        yield bad(
            f"{cut:.0%} of the completions are cut off at the length limit.",
            "Raise --response_length, or start from a model that has learned to end its answers.",
        )
    if max(run.numbers("reward")) <= 0:
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
    elif _has(run, "reward", steps=2 * FEW_STEPS) and late - early < 0.02 * max(abs(early), abs(late)):
        yield bad(
            f"The reward is flat: {early:.3g} at the start, {late:.3g} at the end.",
            "Raise --learning_rate, or the groups with --num_samples_per_prompt_rollout; read some completions.",
        )
    elif late > early:
        yield good(f"The reward went from {early:.3g} to {late:.3g}.")


def _policy(run: RunFiles) -> Iterator[Finding]:
    clipped, drift = _late(run, "clip_fraction"), _late(run, "logprob_diff/mean")
    if clipped > 0.2:
        yield fair(
            f"{clipped:.0%} of the tokens were clipped: the policy moves far within a step.",
            "Lower --learning_rate, --num_epochs or --num_mini_batches.",
        )
    if drift > 0.1:
        yield fair(
            f"Learner and engine differ by {drift:.2g} in a token's log-prob on average.",
            "Lower --async_steps; where that is 0, use --vllm_dtype policy; --rho_correction bounds the harm.",
        )
    early, late = _early(run, "entropy"), _late(run, "entropy")
    if _has(run, "entropy", steps=FEW_STEPS) and late < 0.1 * early:
        yield fair(
            f"The policy has lost its variety: its entropy fell from {early:.3g} to {late:.3g}.",
            "Raise --clip_higher, or set --beta, so that rare tokens keep their chance.",
        )


def _time(run: RunFiles) -> Iterator[Finding]:
    parts = parts_of_step(run)
    whole = fsum(parts.values())
    remedies = {
        "data": (0.2, "waits for its rows", "Put --cache_dir on a fast disk."),
        "checkpoint": (0.2, "writes checkpoints", "Raise --checkpointing_steps, or set --async_checkpoints on."),
        "generate": (0.6, "waits for completions", "Raise --vllm_num_engines, or --async_steps."),
        "sync": (0.3, "sends weights", "Raise --weight_sync_bucket_mib, or take more completions in a step."),
    }
    for name, (share, what, remedy) in remedies.items():
        if whole and len(run.rows) >= FEW_STEPS and parts.get(name, 0) > share * whole:
            yield fair(f"A step {what} for {parts[name] / whole:.0%} of its time.", remedy)
    name = "tokens_per_second"
    early, late = _early(run, name), _late(run, name)
    if _has(run, name, steps=2 * FEW_STEPS) and late < 0.7 * early:
        yield fair(
            f"The run has become slower: {early:,.0f} tokens/s at first, {late:,.0f} at the end.",
            "See whether others use the machine, and whether functions run uncompiled (run.log says).",
        )


def _memory(run: RunFiles) -> Iterator[Finding]:
    measured = max(run.numbers("peak_memory_gib"), default=0.0)
    planned, limit = planned_gib(run), run.plan.get("memory_bytes", 0) / 2**30
    if measured > 0.95 * limit > 0:
        yield fair(
            f"Memory is nearly used up: {measured:.1f} of {limit:.1f} GiB.",
            "--activation_checkpointing full, or a smaller --per_device_train_batch_size, makes room.",
        )
    elif _has(run, "peak_reserved_gib") and measured > 1.15 * planned > 0:
        yield fair(f"More memory was used than planned: {measured:.1f} GiB, not {planned:.1f}.")
    if retries := max(run.numbers("allocation_retries/max"), default=0):
        yield fair(
            f"The allocator ran out of memory and tried again, {counted(int(retries), 'time')}.",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lessens fragmentation; smaller rows need less.",
        )
    if _late(run, "padding_fraction") > 0.3:
        text = f"{_late(run, 'padding_fraction'):.0%} of what is computed is padding."
        yield fair(text, "Leave --packing on, and give a device more rows at a time.")


def planned_gib(run: RunFiles) -> float:
    """What the largest phase was planned to need; 0 where there is no plan."""
    return max((phase["total_bytes"] for phase in run.plan.get("phases", [])), default=0) / 2**30


RULES: tuple[Callable[[RunFiles], Iterator[Finding]], ...] = (
    *(_place, _finite, _loss, _gradient, _preferences, _held_out),
    *(_reward, _policy, _time, _memory),
)
