"""`benchmarks/dpo_throughput.py` with a model of 1B, in the ways that people run it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import REPOSITORY

from gpu_check.findings import Findings
from gpu_check.rows import write_rows

PROGRAM = REPOSITORY / "benchmarks" / "dpo_throughput.py"
# Whether prompts are shared, and flags of the run.
WAYS: dict[str, tuple[str, list[str]]] = {
    "uncompiled": ("off", ["--no_compile_model"]),
    "uncompiled, prompts shared": ("on", ["--no_compile_model"]),
    "compiled": ("off", ["--compile_model"]),
    "uncompiled, blocks recomputed": (
        "off",
        ["--no_compile_model", "--activation_checkpointing", "full"],
    ),
}
PLAN_TOLERANCE = 0.05
"""Of what was allocated.

What the compiler fuses is counted as uncompiled, so such a run may need less.
"""


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    size, length, num_steps, batch = ("tiny", 128, 3, 2) if rehearse else ("olmo2-1b", 2048, 9, 8)
    rows = write_rows(
        work / "rows.jsonl",
        num_rows=batch * num_steps,
        prompt_words=length // 8,
        reply_words=length // 8,
    )
    table: list[dict[str, object]] = []
    for name, (sharing, flags) in list(WAYS.items())[: 2 if rehearse else None]:
        words = [
            "--rows",
            rows,
            "--size",
            size,
            "--prefix_sharing",
            sharing,
            "--max_seq_length",
            length,
        ]
        words += ["--batch", batch, "--num_steps", num_steps, "--num_warmup_steps", num_steps // 3]
        if (
            run := figures_of(findings, name, work, [*map(str, words)], flags, rehearse=rehearse)
        ) is None:
            continue
        table.append({"run": name} | run)
        # Else the plan would have to be told how much of each row is shared.
        if not rehearse and sharing == "off":
            judge_plan(findings, name, run, is_bound="--compile_model" in flags)
        findings.tables.clear()
        findings.table(
            "Packed DPO; FLOPs are those of all tokens of the rows, shared or not", table
        )
    if table:
        best = max(table, key=lambda row: row["MFU"])  # type: ignore[arg-type, return-value]
        findings.headline = (
            f"{best['run']}: MFU {best['MFU']:.1%}, {best['tokens/s']:,.0f} tokens/s"
        )


def figures_of(
    findings: Findings,
    name: str,
    work: Path,
    words: Sequence[str],
    flags: Sequence[str],
    *,
    rehearse: bool,
) -> dict[str, Any] | None:
    """Run the program; its figures, or None and a failure.

    The model is kept in `work` for the next one.
    """
    figures = work / "figures.json"
    figures.unlink(missing_ok=True)
    own = [
        "--json",
        str(figures),
        "--folder",
        str(work / "kept"),
        *(["--peak_tflops", "0.1"] if rehearse else []),
    ]
    done = subprocess.run([sys.executable, str(PROGRAM), *own, *words, "--", *flags])
    findings.require(
        done.returncode == 0, f"{name}: ended with code {done.returncode}; its words are in the log"
    )
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def judge_plan(findings: Findings, name: str, run: Mapping[str, Any], *, is_bound: bool) -> None:
    planned, allocated = run["planned, GiB"], run["allocated, GiB"]
    told = f"{name}: the plan of {planned:.2f} GiB is {planned / allocated:.2f}x what was allocated"
    findings.require(is_near(planned, allocated, is_bound=is_bound), told)


def is_near(planned: float, allocated: float, *, is_bound: bool) -> bool:
    """Whether a plan is what was allocated, or, where it `is_bound`, at least not less."""
    return (1 - PLAN_TOLERANCE) * allocated <= planned and (
        is_bound or planned <= (1 + PLAN_TOLERANCE) * allocated
    )
