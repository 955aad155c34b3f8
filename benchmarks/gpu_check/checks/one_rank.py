"""One rank under torchrun, over NCCL: a run that is stopped and resumed is the run that was not;
its export opens.
"""

from pathlib import Path

import torch

from gpu_check.devices import device_of
from gpu_check.findings import Findings
from gpu_check.ranks import Run, codes_of
from gpu_check.same_run import DPO, all_ended_well, folders, judge_resumed, of_small_model, weights


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    flags = of_small_model(work, num_rows=32, rehearse=rehearse)
    flags += ("--param_dtype", "bfloat16", "--per_device_train_batch_size", "4")

    def run(name: str, num_steps: int) -> Run:
        words = (*flags, *folders(work, name), "--max_train_steps", str(num_steps))
        return Run(name=name, module=DPO, words=words, num_ranks=1)

    codes = codes_of([run("whole", 4), run("whole_again", 4), run("stopped", 2)], rehearse=rehearse)
    codes["stopped"] = codes["stopped"] or run("stopped", 4).start(rehearse=rehearse).wait()
    if not all_ended_well(findings, codes):
        return
    resumed = judge_resumed(findings, work)
    open_export(findings, work / "whole" / "hf_model", device_of(rehearse))
    findings.headline = f"{resumed}; exports open"


def open_export(findings: Findings, folder: Path, device: torch.device) -> None:
    """transformers opens it, holds the weights that were written, and writes a reply."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    held, written = model.state_dict(), weights(folder.parent)
    findings.require(
        all(torch.equal(held[name], tensor) for name, tensor in written.items()),
        "transformers holds other weights",
    )
    ids = tokenizer("One and one are", return_tensors="pt").to(device)
    reply = model.to(device).generate(**ids, max_new_tokens=4, do_sample=False)
    findings.require(
        reply.shape[1] > ids["input_ids"].shape[1], "the exported model writes nothing"
    )
