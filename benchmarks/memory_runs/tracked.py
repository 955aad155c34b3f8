"""The peak bytes of rank 0 in a step by PyTorch's `FSDPMemTracker`, on fake tensors in a fake
process group.

python -m benchmarks.memory_runs.tracked CASE      # a case as JSON
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import build_world_mesh
from olmo_core.train.train_module.transformer.common import parallelize_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory_runs.cases import NUM_STEPS, Case, build, case_of, optimizer_of
from open_instruct.models.attention.segments import Segments
from open_instruct.parallel.data_parallel import build_parallel_configs

MIB = 2**20


def track(case: Case) -> int:
    """Peak bytes of rank 0, in this process.

    The loss is the plain sum of the log-probs; DPO's is a few numbers more.
    """
    dist.init_process_group("fake", rank=0, world_size=case.layout.world_size, store=FakeStore())
    mesh = build_world_mesh(
        dp=build_parallel_configs(case.layout, param_dtype=case.param_dtype)["dp"],
        device_type="cpu",
    )
    with FakeTensorMode():
        model, how = build(case)
        model = parallelize_model(model, world_mesh=mesh, **how)
        optimizer = optimizer_of(case).build(model)
        # DTensor works out shapes with tensors of the global shape the first time; the tracker
        # would count those.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.state.clear()
        peak = _peak(case, model, optimizer)
    for kind, num_bytes in sorted(peak.items(), key=str):
        print(kind, f"{num_bytes / MIB:.1f}", file=sys.stderr)
    return int(peak["Total"])


def _peak(case: Case, model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes by kind at the worst moment of the steps."""
    num_tokens = sum(case.lengths)
    ids_BT = torch.zeros(1, num_tokens, dtype=torch.long)
    positions_BK = torch.zeros(1, num_tokens - len(case.lengths), dtype=torch.long)
    segments = Segments.from_lengths(
        case.lengths, (0,) * len(case.lengths), device=torch.device("cpu")
    )
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids_BT, positions_BK, segments.positions_T))
    with tracker:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad(set_to_none=True)
            for index in range(case.num_microbatches):
                is_last = index == case.num_microbatches - 1
                model.set_is_last_backward(is_last)
                (
                    model.set_requires_gradient_sync
                    if case.reduces_last
                    else model.set_requires_all_reduce
                )(is_last)
                output = model(
                    ids_BT,
                    labels=ids_BT,
                    loss_reduction="none",
                    return_logits=False,
                    logits_to_keep=positions_BK,
                    segments=segments,
                )
                output.loss.sum().backward()
                del output
                tracker.reset_mod_stats()  # it follows a module through one pass only
            optimizer.step()
    (peak,) = (
        kinds for at, kinds in tracker.get_tracker_snapshot("peak").items() if at.type == "cpu"
    )
    return peak


if __name__ == "__main__":
    print(track(case_of(sys.argv[1])))
