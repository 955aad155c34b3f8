"""One rank under torchrun, over NCCL: a run that is stopped and resumed is the run that was not; its export opens."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from gpu_check.devices import device_of
from gpu_check.findings import Findings
from gpu_check.rows import write_rows
from open_instruct.toys.tiny import write_tiny_model


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    model = write_tiny_model(work / "model", family="olmo2", size="tiny" if rehearse else "small")
    rows = write_rows(work / "rows.jsonl", num_rows=32, prompt_words=8, reply_words=8)
    common = [
        *("--model_name_or_path", str(model), "--mixer_list", str(rows), "1.0", "--max_seq_length", "256"),
        *("--param_dtype", "bfloat16", "--learning_rate", "1e-4", "--lr_scheduler_type", "constant"),
        *("--per_device_train_batch_size", "4", "--export_dtype", "float32", "--warmup_ratio", "0"),
        "--no_compile_model",
    ]

    def start(name: str, num_steps: int) -> subprocess.Popen[bytes]:
        own = ["--output_dir", str(work / name), "--cache_dir", str(work / f"cache_{name}")]
        own += ["--max_train_steps", str(num_steps)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
        words = [*launcher, "-m", "gpu_check.deterministic_dpo", *common, *own]
        # cuBLAS gives the same numbers again only where its workspace is fixed.
        return subprocess.Popen(words, env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})

    together = {"whole": 4, "whole_again": 4, "stopped": 2}
    if rehearse:  # on a CPU they take turns
        codes = {name: start(name, num_steps).wait() for name, num_steps in together.items()}
    else:
        running = {name: start(name, num_steps) for name, num_steps in together.items()}
        codes = {name: run.wait() for name, run in running.items()}
    codes["stopped"] = codes["stopped"] or start("stopped", 4).wait()
    for name, code in codes.items():
        findings.require(code == 0, f"the run '{name}' ended with code {code}")
    if any(codes.values()):
        return

    same = {name: outcome(work / name) == outcome(work / "whole") for name in ("whole_again", "stopped")}
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
        findings.require(same["stopped"], "the resumed run is not bit for bit the run that was not stopped")
    else:
        findings.note("Two runs of the same flags differ here: that the resumed one does says nothing.")
        findings.require(apart < 1e-3, f"a weight of the resumed run is {apart:.2g} apart")
    open_export(findings, work / "whole" / "hf_model", device_of(rehearse))
    findings.headline = f"resumed: {'bit for bit the same' if same['stopped'] else f'{apart:.1e} apart'}; exports open"


def outcome(run: Path) -> tuple[object, ...]:
    """Loss and gradient norm of every step, and a digest of the exported weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted((run / "hf_model").glob("*.safetensors"))))
    return (*((row["loss"], row["grad_norm"]) for row in rows), digest.hexdigest())


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((run / "hf_model").glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no dict)
    return found


def furthest(run: Path, other: Path) -> float:
    theirs = weights(other)
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in weights(run).items())


def open_export(findings: Findings, folder: Path, device: torch.device) -> None:
    """transformers opens it, holds the weights that were written, and writes a reply."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held, written = model.state_dict(), weights(folder.parent)
    findings.require(
        all(torch.equal(held[name], tensor) for name, tensor in written.items()), "transformers holds other weights"
    )
    ids = tokenizer("One and one are", return_tensors="pt").to(device)
    reply = model.to(device).generate(**ids, max_new_tokens=4, do_sample=False)
    findings.require(reply.shape[1] > ids["input_ids"].shape[1], "the exported model writes nothing")
