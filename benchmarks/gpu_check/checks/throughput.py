"""`benchmarks/dpo_throughput.py` with a model of 1B, in the ways that people run it."""

import json
import subprocess
import sys
from pathlib import Path

from harness import REPOSITORY

from gpu_check.findings import Findings
from gpu_check.rows import write_rows

PROGRAM = REPOSITORY / "benchmarks" / "dpo_throughput.py"
# Whether prompts are shared, and flags of the run.
WAYS: dict[str, tuple[str, list[str]]] = {
    "uncompiled": ("off", ["--no_compile_model"]),
    "uncompiled, prompts shared": ("on", ["--no_compile_model"]),
    "compiled": ("off", ["--compile_model"]),
    "uncompiled, blocks recomputed": ("off", ["--no_compile_model", "--activation_checkpointing", "full"]),
}
PLAN_TOLERANCE = 0.05
"""Of what was allocated. What the compiler fuses is counted as uncompiled, so such a run may need less."""


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    size, length, num_steps, batch = ("tiny", 128, 3, 2) if rehearse else ("olmo2-1b", 2048, 9, 8)
    rows = write_rows(
        work / "rows.jsonl", num_rows=batch * num_steps, prompt_words=length // 8, reply_words=length // 8
    )
    table: list[dict[str, object]] = []
    for name, (sharing, flags) in list(WAYS.items())[: 2 if rehearse else None]:
        figures = work / "figures.json"
        figures.unlink(missing_ok=True)
        words = [
            "--json",
            str(figures),
            "--folder",
            str(work / "kept"),
            "--rows",
            str(rows),
            "--size",
            size,
            "--prefix_sharing",
            sharing,
        ]
        words += ["--max_seq_length", str(length), "--batch", str(batch), "--num_steps", str(num_steps)]
        words += ["--num_warmup_steps", str(num_steps // 3), *(["--peak_tflops", "0.1"] if rehearse else [])]
        done = subprocess.run([sys.executable, str(PROGRAM), *words, "--", *flags])
        findings.require(done.returncode == 0, f"{name}: ended with code {done.returncode}; its words are in the log")
        if done.returncode != 0:
            continue
        run = json.loads(figures.read_text())
        table.append({"run": name} | run)
        planned, allocated = run["planned, GiB"], run["allocated, GiB"]
        if not rehearse and sharing == "off":  # else the plan would have to be told how much of each row is shared
            told = f"{name}: the plan of {planned:.2f} GiB is {planned / allocated:.2f}x what was allocated"
            findings.require(is_near(planned, allocated, is_bound="--compile_model" in flags), told)
        findings.tables.clear()
        findings.table("Packed DPO; FLOPs are those of all tokens of the rows, shared or not", table)
    if table:
        best = max(table, key=lambda row: row["MFU"])  # type: ignore[arg-type, return-value]
        findings.headline = f"{best['run']}: MFU {best['MFU']:.1%}, {best['tokens/s']:,.0f} tokens/s"


def is_near(planned: float, allocated: float, *, is_bound: bool) -> bool:
    """Whether a plan is what was allocated, or, where it `is_bound`, at least not less."""
    return (1 - PLAN_TOLERANCE) * allocated <= planned and (is_bound or planned <= (1 + PLAN_TOLERANCE) * allocated)
