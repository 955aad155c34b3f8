"""GRPO with vLLM engines of one device, of two, and in turns with the learners (on policy, with
completions that are paused, and with an engine beside them): after every sync, engines' log-probs
against the learners'.

On GPUs the engines have vLLM's V2 model runner and schedule ahead, and the second run changes
weights in the midst of completions. vLLM's CPU build, which the rehearsal takes, has the V1 runner
alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import REPOSITORY

from gpu_check.findings import Findings
from gpu_check.ranks import devices
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.rl.traces import read_traces

MOST_APART = 1e-2
"""Nats that a token's log-probs may be apart on average, in bfloat16."""
NUM_LEARNERS, NUM_STEPS = 2, 4
PROMPTS_A_STEP, GROUP = 8, 4
# Devices of all engines beside those of learners, and flags. Where weights change within
# completions, steps are so small that rounding is more.
Ways = dict[str, tuple[int, str]]
ON_POLICY = "--async_steps 0 --learning_rate 1e-4"
AHEAD = "--async_steps 1 --inflight_updates true --learning_rate 1e-6"
APART: Ways = {
    "one device": (1, f"{ON_POLICY} --vllm_num_engines 1"),
    "two devices, updates in flight": (
        2,
        f"{AHEAD} --vllm_num_engines 1 --vllm_tensor_parallel_size 2",
    ),
}
IN_TURNS: Ways = {
    "in turns with the learners": (0, f"{ON_POLICY} --placement shared"),
    "in turns, completions paused": (0, f"{AHEAD} --placement shared"),
    "one of three beside the turns": (
        1,
        f"{AHEAD} --placement mixed --vllm_num_engines {NUM_LEARNERS + 1}",
    ),
}


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    model = write_tiny_model(
        work / "model", family="olmo2", size="tiny" if rehearse else "small", dtype="bfloat16"
    )
    prompts = work / "prompts.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"Number {i}?"}], "ground_truth": str(i)}
        for i in range(64)
    )
    prompts.write_text(
        "".join(json.dumps(row | {"dataset": "share_of_digits"}) + "\n" for row in rows)
    )
    common = f"""
        --model_name_or_path {model} --dataset_mixer_list {prompts} 1.0 --verifier gpu_check.digits:share_of_digits
        --num_learners_per_node {NUM_LEARNERS} --param_dtype bfloat16 --lr_scheduler_type constant
        --warmup_ratio 0 --num_unique_prompts_rollout {PROMPTS_A_STEP} --num_samples_per_prompt_rollout {GROUP}
        --total_episodes {NUM_STEPS * PROMPTS_A_STEP * GROUP} --max_prompt_token_length 32 --save_traces true
        --response_length {16 if rehearse else 256} --vllm_kv_cache_mib {32 if rehearse else 2048}
        --checkpointing_steps 100 --no_compile_model {"" if rehearse else "--vllm_async_scheduling on --vllm_runner v2"}
    """.split()
    folders: dict[str, Path] = {}
    for ways in (APART, IN_TURNS):  # the second on devices that the first have left
        for name, code in run_beside(ways, common, work, rehearse).items():
            findings.require(code == 0, f"{name}: ended with code {code}")
            if code == 0:
                folders[name] = folder_of(work, name)
    compare(findings, folders)
    if rehearse:
        findings.note(
            "vLLM's CPU build has the V1 model runner: that this one agrees says nothing of V2."
        )


def run_beside(ways: Ways, common: Sequence[str], work: Path, rehearse: bool) -> dict[str, int]:
    """Run all at once, each on devices of its own, or one after another on a CPU; returns how each
    ended.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    first_device = 0
    for name, (size, flags) in ways.items():
        own = ["--output_dir", str(folder_of(work, name)), *flags.split()]
        running[name] = start(
            [*common, *own],
            first_device=first_device,
            num_devices=NUM_LEARNERS + size,
            rehearse=rehearse,
        )
        first_device += NUM_LEARNERS + size
        if rehearse:
            running[name].wait()
    return {name: process.wait() for name, process in running.items()}


def folder_of(work: Path, name: str) -> Path:
    return work / name.replace(" ", "_").replace(",", "")


def start(
    words: Sequence[str], *, first_device: int, num_devices: int, rehearse: bool
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if not rehearse:
        environment |= devices(first_device, num_devices)
    program = REPOSITORY / "open_instruct" / "grpo_olmo_core_actor.py"
    return subprocess.Popen([sys.executable, str(program), *words], env=environment)


def compare(findings: Findings, folders: dict[str, Path]) -> None:
    """Every step of every run in its folder: one that learned from nothing has no figure, and
    fails.
    """
    table: list[dict[str, object]] = []
    worst = 0.0
    for name, folder in folders.items():
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            apart = row.get("logprob_diff/mean", float("nan"))
            told = (
                f"{name}: log-probs of step {row['step']} are {apart:.2g} apart, and may be "
                f"{MOST_APART:g}"
            )
            findings.require(apart <= MOST_APART, told)
            worst = max(worst, apart)
            table.append(
                {
                    "engine": name,
                    "step": row["step"],
                    "apart, mean": apart,
                    "apart, most": row.get("logprob_diff/max"),
                    "completions of several versions": num_mixed(folder, row["step"]),
                    "sync, s": row["time/sync"],
                }
            )
    findings.table("Log-probs of the sampled tokens, engine against learner, bfloat16", table)
    for name, (_, flags) in (APART | IN_TURNS).items():
        rows = [row for row in table if row["engine"] == name]
        is_mixed = any(row["completions of several versions"] for row in rows)
        if rows and AHEAD in flags and not is_mixed:
            findings.note(
                f"{name}: no completion had weights of two versions: updates came between them."
            )
    findings.headline = f"{', '.join(folders)}: at most {worst:.1e} nats apart on average"


def num_mixed(folder: Path, step: int) -> int:
    """Completions of a step whose tokens are of more than one version of the weights."""
    groups = read_traces(folder, step)
    return sum(len(set(each.versions)) > 1 for group in groups for each in group.completions)
