"""Compiled blocks against uncompiled ones: the same losses, how many versions are compiled, what a
budget saves.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gpu_check.findings import Findings
from gpu_check.rows import write_rows
from open_instruct.commands.tiny_model import write_tiny_model

MOST_VERSIONS = 12  # six of a kind of block: OLMo 3 has layers with a window, and without
MAX_DIFFERENCE = 0.05
NUM_WARMUP_STEPS = 3
MICROBATCHES_A_STEP = 4
WAYS: dict[str, list[str]] = {
    "uncompiled": ["--no_compile_model"],
    "compiled": ["--compile_model"],
    "compiled, half the activations": ["--activation_memory_budget", "0.5"],
}


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    size, num_steps, length, batch = ("tiny", 4, 96, 2) if rehearse else ("small", 10, 1024, 4)
    model = write_tiny_model(work / "model", family="olmo3", size=size)
    # Most prompts are too short to be shared: so some microbatches share prompts, and some do not.
    write = partial(write_rows, reply_words=length // 8)
    num_rows = batch * MICROBATCHES_A_STEP * num_steps
    sharing = write(
        work / "sharing.jsonl", num_rows=max(1, num_rows // 5), prompt_words=length // 8
    )
    alone = write(work / "alone.jsonl", num_rows=num_rows, prompt_words=1)
    heldout = write(work / "heldout.jsonl", num_rows=batch, prompt_words=length // 16, seed=1)
    flags = [
        *(
            "--model_name_or_path",
            str(model),
            "--mixer_list",
            str(sharing),
            "1.0",
            str(alone),
            "1.0",
        ),
        *("--eval_mixer_list", str(heldout), "1.0", "--max_seq_length", str(length)),
        *(
            "--per_device_train_batch_size",
            str(batch),
            "--gradient_accumulation_steps",
            str(MICROBATCHES_A_STEP),
        ),
        *("--param_dtype", "bfloat16", "--learning_rate", "1e-5"),
    ]
    runs: dict[str, Any] = {}
    table: list[dict[str, object]] = []
    for name, more in list(WAYS.items())[: 2 if rehearse else None]:
        own = [
            "--output_dir",
            str(work / f"run{len(runs)}"),
            "--cache_dir",
            str(work / f"cache{len(runs)}"),
        ]
        run = runs[name] = measured_apart(
            "dpo", [*flags, *own, *more], num_steps=num_steps, work=work
        )
        steps, reference = run["steps"], runs["uncompiled"]["steps"]
        furthest = {
            metric: max(
                abs(ours[metric] / theirs[metric] - 1)
                for ours, theirs in zip(steps, reference, strict=True)
            )
            for metric in ("loss", "grad_norm")
        }
        table.append(
            {
                "run": name,
                "s a step": median(step["seconds"] for step in steps[NUM_WARMUP_STEPS:]),
                "s of the first step": steps[0]["seconds"],
                "tokens shared, of all": f"{median(step['shared_fraction'] for step in steps):.0%}",
                "loss, furthest from uncompiled": f"{furthest['loss']:.2%}",
                "gradient norm": f"{furthest['grad_norm']:.2%}",
                "allocated, GiB": run["allocated_gib"],
                "versions of a block": run["versions"]["block"],
                "of the head": run["versions"]["head"],
            }
        )
        findings.require(
            max(furthest.values()) < MAX_DIFFERENCE, f"{name}: not the losses of the uncompiled run"
        )
        findings.require(
            run["versions"]["block"] <= MOST_VERSIONS,
            f"{name}: {run['versions']['block']} versions of a block",
        )
        if not rehearse and name != "uncompiled":
            findings.require(run["versions"]["block"] > 0, f"{name}: no block was compiled")
        findings.require(
            not any("recompile_limit" in line for line in run["compiler"]),
            f"{name}: fell back to eager",
        )
        for line in dict.fromkeys(run["compiler"]):
            findings.note(f"{name}: the compiler says: {line}")
    findings.table("DPO with reference pass, shared and unshared prompts, held-out rows", table)
    kept = [runs[name]["allocated_gib"] for name in list(WAYS)[1:] if name in runs]
    if rehearse:
        findings.note("Without CUDA nothing is compiled, and a budget recomputes whole blocks.")
    else:
        findings.require(kept[1] < kept[0], f"half the activations need no less memory: {kept} GiB")
    findings.headline = f"compiled {table[0]['s a step'] / table[1]['s a step']:.2f}x as fast, " + (  # type: ignore[operator]
        f"{table[1]['versions of a block']} versions of a block"
    )


def measured_apart(objective: str, flags: list[str], *, num_steps: int, work: Path) -> Any:
    """The figures of `measured_run.py` in a process of its own."""
    file = work / "figures.json"
    own = ["--figures", str(file), "--num_steps", str(num_steps)]
    subprocess.run(
        [sys.executable, "-m", "gpu_check.measured_run", objective, *own, "--", *flags], check=True
    )
    return json.loads(file.read_text())
