"""A run of an offline objective whose steps are measured, and that ends after the last of them
without a checkpoint.

python -m gpu_check.measured_run dpo --figures FILE --num_steps 12 -- FLAGS OF THE RUN

FILE gets one JSON object: `steps` (seconds of each, its tokens and metrics), `planned_gib` (what
the planner says of this run with its fullest row, but for its allowance for CUDA itself),
`allocated_gib` and `reserved_gib` (PyTorch's peaks; without CUDA the process's own; of rank 0),
`versions` (of a block and of the head, if they are compiled), `compiler` (what the compiler warned
of), `waits` (see --waits_in_step).
"""

import argparse
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness.memory import memory_bytes

from gpu_check.compiler import Listening
from gpu_check.devices import GIB, known_gpu
from gpu_check.step_meter import Enough, StepMeter
from open_instruct.commands.plan import parse_request
from open_instruct.commands.run_flags import parse_run
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from open_instruct.parallel.process import stop_process
from open_instruct.planning.memory.parts import CUDA
from open_instruct.planning.memory.phases import memory_by_phase
from open_instruct.planning.plan import make_plan
from open_instruct.train import train


def measured(
    objective_name: str, words: list[str], *, num_steps: int, waits_in_step: int | None = None
) -> dict[str, Any] | None:
    """Run the objective with the flags in `words`, and give what the module's text lists; on rank 0
    alone.
    """
    objective = load_objective(objective_name)
    config: Any = parse_run(
        objective.config_class, [*words, "--max_train_steps", str(num_steps + 1)]
    )
    objective.validate(config)
    meter = StepMeter(num_steps=num_steps, waits_in_step=waits_in_step)
    warned = Listening()
    for name in ("torch._dynamo", "torch._inductor"):
        logging.getLogger(name).addHandler(warned)
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.init()  # before that the allocator has no peak to forget
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.reset_peak_memory_stats()
    try:
        train(config, objective=objective, callbacks={"meter": meter})
    except Enough:
        stop_process()
    if os.environ.get("RANK", "0") != "0":
        return None
    rows = [
        json.loads(line)
        for line in Path(config.run.output_dir, "metrics.jsonl").read_text().splitlines()
    ]
    steps = [
        {"seconds": seconds, "tokens": tokens, **row}
        for seconds, tokens, row in zip(meter.seconds, meter.tokens, rows, strict=True)
    ]
    (own,) = memory_bytes("VmHWM")
    return {
        "steps": steps,
        "planned_gib": planned_bytes(
            objective_name, words, num_tokens=meter.most_tokens, on_cuda=on_cuda
        )
        / GIB,
        "allocated_gib": (torch.cuda.max_memory_allocated() if on_cuda else own) / GIB,
        "reserved_gib": (torch.cuda.max_memory_reserved() if on_cuda else own) / GIB,
        "versions": meter.versions,
        "compiler": warned.lines,
        "waits": dict(meter.waits),
    }


def planned_bytes(objective_name: str, words: list[str], *, num_tokens: int, on_cuda: bool) -> int:
    """The peak of the plan of this run on these devices, without what CUDA and its libraries take
    beside PyTorch.

    Its rows are taken to have as many tokens as the fullest one that was met.
    """
    given = ["--gpus_per_node", os.environ.get("WORLD_SIZE", "1")]
    if (gpu := known_gpu()) is not None:
        given += ["--gpu", gpu]
    plan = make_plan(
        replace(parse_request([objective_name, *words, *given]).setting, on_cuda=on_cuda)
    )
    num_labels = min(num_tokens, plan.workload.label_tokens_per_microbatch)
    met = replace(
        plan.workload, tokens_per_microbatch=num_tokens, label_tokens_per_microbatch=num_labels
    )
    setting = plan.setting
    phases = memory_by_phase(setting.backend.memory_model(setting.shape, plan.layout, met))
    return max(phase.total_bytes - dict(phase.parts).get(CUDA, 0) for phase in phases)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("objective", choices=OBJECTIVES)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--num_steps", type=int, default=12)
    parser.add_argument("--waits_in_step", type=int, help="count the host's waits in this step")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    figures = measured(
        args.objective, flags, num_steps=args.num_steps, waits_in_step=args.waits_in_step
    )
    if figures is not None:
        args.figures.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
