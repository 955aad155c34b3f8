"""DPO of a 7B model over 8 shards: MFU compiled, and memory against its plan.

Uncompiled the plan must be what was allocated; compiled it is a bound. The model has random
weights, which are written first: 14 GiB in the folder for temporary files.
"""

import json
from pathlib import Path
from typing import Any

from gpu_check.checks.throughput import figures_of, judge_plan
from gpu_check.devices import device_of
from gpu_check.findings import Findings
from gpu_check.rows import write_rows
from open_instruct.commands.tiny_model import SPECIAL_TOKENS, built_in_corpus, train_tokenizer
from open_instruct.planning.subject.read_shape import public_models

MODEL = "allenai/OLMo-2-1124-7B"
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
NUM_RANKS = 8
FILE_BYTES = 2 * 2**30
LEAST_MFU = 0.3
"""The goal is 45% (benchmarks/dpo_throughput.py).

Below two thirds of it something is in the way.
"""
COMPILED = "compiled"
# Steps, and flags of the run. What fits without recomputing everything is the run's own choice
# where it is timed.
WAYS = {
    "uncompiled, blocks recomputed": (
        3,
        ["--no_compile_model", "--activation_checkpointing", "full"],
    ),
    COMPILED: (6, ["--compile_model"]),
}


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    length, batch = (128, 1) if rehearse else (2048, 4)
    write_model(
        work / "kept" / "model",
        public_models()[MODEL] | (TINY if rehearse else {}),
        rehearse=rehearse,
    )
    words = length // 8
    rows = write_rows(
        work / "rows.jsonl", num_rows=NUM_RANKS * batch * 7, prompt_words=words, reply_words=words
    )
    table: list[dict[str, object]] = []
    for name, (num_steps, flags) in WAYS.items():
        given: list[object] = [
            "--ranks",
            NUM_RANKS,
            "--rows",
            rows,
            "--max_seq_length",
            length,
            "--batch",
            batch,
        ]
        given += ["--num_steps", num_steps, "--num_warmup_steps", num_steps // 2]
        if (
            run := figures_of(findings, name, work, [*map(str, given)], flags, rehearse=rehearse)
        ) is None:
            continue
        table.append({"run": name} | run)
        findings.tables.clear()
        findings.table(f"Packed DPO of 7B on {NUM_RANKS} devices; memory is that of rank 0", table)
        findings.headline = f"{name}: MFU {run['MFU']:.1%}, {run['tokens/s']:,.0f} tokens/s"
        if not rehearse:
            judge(findings, name, run)


def judge(findings: Findings, name: str, run: dict[str, Any]) -> None:
    judge_plan(findings, name, run, is_bound=name == COMPILED)
    if name == COMPILED:
        told = f"{name}: MFU is {run['MFU']:.1%}, and below {LEAST_MFU:.0%} something is in the way"
        findings.require(run["MFU"] >= LEAST_MFU, told)


def write_model(folder: Path, fields: dict[str, Any], *, rehearse: bool) -> None:
    """A model with random weights, made on the device, and a tokenizer: transformers would take
    minutes on a CPU.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    from open_instruct.core.families import FAMILIES

    folder.mkdir(parents=True)
    ids = {
        f"{name}_token_id": SPECIAL_TOKENS.index(f"<|{name}|>") for name in ("pad", "bos", "eos")
    }
    given = {
        name: value for name, value in fields.items() if name not in ("model_type", "dtype")
    } | ids
    config = getattr(transformers, FAMILIES[fields["model_type"]].config_class)(
        **given, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    train_tokenizer(built_in_corpus(), vocab_size=min(8192, fields["vocab_size"])).save_pretrained(
        folder
    )
    device, waiting, held_bytes = device_of(rehearse), {}, 0
    file_of: dict[str, str] = {}
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        tensor = torch.randn(parameter.shape, device=device, dtype=torch.bfloat16) * 0.02
        waiting[name] = (tensor + 1 if "norm" in name else tensor).cpu()
        held_bytes += waiting[name].nbytes
        if held_bytes >= FILE_BYTES or name == names[-1]:
            file = f"model-{len(set(file_of.values()))}.safetensors"
            save_file(waiting, folder / file, metadata={"format": "pt"})
            file_of |= dict.fromkeys(waiting, file)
            waiting, held_bytes = {}, 0
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
