"""One rank of a real run over gloo: it says when its model is about to be built, and when its steps
are done.

torchrun -m benchmarks.memory_runs.measured CASE FOLDER      # a case as JSON
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory_runs.cases import NUM_STEPS, Case, build, case_of, optimizer_of
from open_instruct.batching.documents import pack_documents
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.core.batch_values import PreferenceValues
from open_instruct.core.records import Batch, Document, Span, StepBatch
from open_instruct.models.shards import local_part
from open_instruct.olmo_core_train_modules import DPOTrainModule


class Recorder:
    """What a train module asks of its trainer."""

    global_step = NUM_STEPS
    global_train_tokens_seen = 0

    def record_metric(self, *values: Any, **more: Any) -> None:
        pass


def run_rank(case: Case, folder: Path) -> None:
    """Take the steps of a case, and write this rank's process id to `built-RANK` before, and
    `done-RANK` after.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # One product and one collective make the libraries' own buffers.
    dtype = getattr(torch, case.param_dtype)
    warm = torch.ones(512, 512, dtype=dtype) @ torch.ones(512, 512, dtype=dtype)
    dist.all_reduce(warm.float())
    del warm
    batch = batch_of(case)
    dist.barrier()
    (folder / f"built-{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(0.2)
    module = build_module(case)
    counts = {"rows": len(case.pairs), "tokens": 0}
    step = StepBatch(microbatches=(batch,) * case.num_microbatches, counts=counts)
    for _ in range(NUM_STEPS):
        module.zero_grads()
        module.train_batch({"step": step})
        module.optim_step()
    dist.barrier()
    (folder / f"done-{dist.get_rank()}").write_text("")
    dist.barrier()
    dist.destroy_process_group()


def build_module(case: Case) -> Any:
    """The train module of a run, on this rank's part of the mesh, with weights drawn at random."""
    model, how = build(case)
    module: Any = DPOTrainModule(
        model=model,
        optim=optimizer_of(case),
        max_grad_norm=1.0,
        loss=PreferenceLossSection(),
        reduces_last=case.reduces_last,
        **how,
    )
    module._trainer = Recorder()
    module.scheduler = None
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.model.parameters():
            for row in local_part(parameter):
                row.normal_(0.0, 0.02, generator=draw)
    return module


def batch_of(case: Case) -> Batch:
    """One microbatch of random pairs, with a label at every token but the first of each
    document.
    """
    draw = torch.Generator().manual_seed(0)
    documents = [
        Document(
            token_ids=tuple(torch.randint(case.vocab_size, (length,), generator=draw).tolist()),
            responses=(Span(start=1, stop=length),),
        )
        for length in case.lengths
    ]
    return Batch(
        packed=pack_documents(documents),
        row_ids=tuple(range(len(case.pairs))),
        values=PreferenceValues(reference_logps_S=torch.zeros(len(documents))),
    )


if __name__ == "__main__":
    run_rank(case_of(sys.argv[1]), Path(sys.argv[2]))
