"""Runs of DPO that ought to be the same: their flags, and how far apart they are."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from gpu_check.findings import Findings
from gpu_check.rows import write_rows
from open_instruct.commands.tiny_model import write_tiny_model

DPO = "gpu_check.deterministic_dpo"
EVEN_STEPS = (
    *("--learning_rate", "1e-4", "--lr_scheduler_type", "constant", "--warmup_ratio", "0"),
    *("--export_dtype", "float32", "--no_compile_model"),
)
"""A run of more steps begins as a shorter one does."""


def of_small_model(work: Path, *, num_rows: int, rehearse: bool) -> tuple[str, ...]:
    """Flags of all runs in `work`: a small model and so many pairs, which are written there."""
    model = write_tiny_model(work / "model", family="olmo2", size="tiny" if rehearse else "small")
    rows = write_rows(work / "rows.jsonl", num_rows=num_rows, prompt_words=8, reply_words=8)
    names = ("--model_name_or_path", str(model), "--mixer_list", str(rows), "1.0")
    return (*names, "--max_seq_length", "256", *EVEN_STEPS)


def folders(work: Path, name: str) -> tuple[str, ...]:
    return ("--output_dir", str(work / name), "--cache_dir", str(work / f"cache_{name}"))


def all_ended_well(findings: Findings, codes: Mapping[str, int]) -> bool:
    for name, code in codes.items():
        findings.require(code == 0, f"the run '{name}' ended with code {code}")
    return not any(codes.values())


def judge_resumed(findings: Findings, work: Path) -> str:
    """Hold the run "stopped" against "whole", where "whole_again" is the same as that; returns what
    to say of it.
    """
    same = {
        name: outcome(work / name) == outcome(work / "whole") for name in ("whole_again", "stopped")
    }
    apart = furthest(work / "stopped", work / "whole")
    findings.table(
        "Against the run of four steps",
        [
            {"run": "the same again", "bit for bit": same["whole_again"]},
            {
                "run": "stopped after two steps, and resumed",
                "bit for bit": same["stopped"],
                "largest difference of a weight": apart,
            },
        ],
    )
    if same["whole_again"]:
        findings.require(
            same["stopped"], "the resumed run is not bit for bit the run that was not stopped"
        )
    else:
        findings.note(
            "Two runs of the same flags differ here: that the resumed one does says nothing."
        )
        findings.require(apart < 1e-3, f"a weight of the resumed run is {apart:.2g} apart")
    return f"resumed: {'bit for bit the same' if same['stopped'] else f'{apart:.1e} apart'}"


def steps_of(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def outcome(run: Path) -> tuple[object, ...]:
    """Its steps, and a digest of the exported weights."""
    digest = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted((run / "hf_model").glob("*.safetensors")))
    )
    return (*steps_of(run), digest.hexdigest())


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((run / "hf_model").glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no dict)
    return found


def furthest(run: Path, other: Path) -> float:
    theirs = weights(other)
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in weights(run).items())
