"""GRPO with vLLM engines of one device, of two, and in turns with the learners: after every
sync, engines' log-probs against the learners'.

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
IN_TURNS = "in turns with the learners"
PROMPTS_A_STEP, GROUP = 8, 4
# Devices of all engines beside those of learners, and flags. Where weights change within
# completions, steps are so small that rounding is more.
WAYS: dict[str, tuple[int, str]] = {
    "one device": (1, "--async_steps 0 --learning_rate 1e-4 --vllm_num_engines 1"),
    "two devices, updates in flight": (
        2,
        "--async_steps 1 --inflight_updates true --learning_rate 1e-6 --vllm_num_engines 1 "
        "--vllm_tensor_parallel_size 2",
    ),
    IN_TURNS: (0, "--async_steps 0 --learning_rate 1e-4 --placement shared"),
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
    running: dict[str, subprocess.Popen[bytes]] = {}
    first_device = 0
    for number, (name, (size, flags)) in enumerate(WAYS.items()):
        own = ["--output_dir", str(work / str(number)), *flags.split()]
        if name == IN_TURNS:  # on devices that the others have left
            for each in running.values():
                each.wait()
            first_device = 0
        running[name] = start(
            [*common, *own],
            first_device=first_device,
            num_devices=NUM_LEARNERS + size,
            rehearse=rehearse,
        )
        first_device += NUM_LEARNERS + size
        if rehearse:
            running[name].wait()
    codes = {name: process.wait() for name, process in running.items()}
    for name, code in codes.items():
        findings.require(code == 0, f"{name}: ended with code {code}")
    compare(
        findings, {name: work / str(number) for number, name in enumerate(WAYS) if codes[name] == 0}
    )
    if rehearse:
        findings.note(
            "vLLM's CPU build has the V1 model runner: that this one agrees says nothing of V2."
        )


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
    if "two devices, updates in flight" in folders and not any(
        row["completions of several versions"] for row in table
    ):
        findings.note(
            "No completion had weights of two versions: updates came between completions."
        )
    findings.headline = f"{', '.join(folders)}: at most {worst:.1e} nats apart on average"


def num_mixed(folder: Path, step: int) -> int:
    """Completions of a step whose tokens are of more than one version of the weights."""
    groups = read_traces(folder, step)
    return sum(len(set(each.versions)) > 1 for group in groups for each in group.completions)
