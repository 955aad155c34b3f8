"""The kernels of training steps, compiled for an H100 where there is none, with what each of them
needs there.

    python -m tests.fake_cuda.kernels               # all cases, about a minute
    python -m tests.fake_cuda.kernels olmo3         # one of them

The blocks and the head of public models, cut to a few layers, in steps of real size and in passes
without gradients: compiled as a run compiles them, by Inductor, Triton and ptxas. See compiler.py.
"""

import json
import random
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.fake_cuda.cases import leave_weights_alone, opened
from tests.fake_cuda.compiler import Kernel, pretend_compiler, set_compiler_environment
from tests.fake_cuda.device import load_hooks, pretend_cuda
from tests.fake_cuda.memory import LLAMA, OLMO, QWEN, TracedCase

OLMO_2 = "allenai/OLMo-2-1124-7B"


@dataclass(frozen=True)
class KernelCase(TracedCase):
    """A case that is compiled.

    `passes`: over rows that are scored, by whether these share their prompts.
    """

    passes: tuple[bool, ...] = (True,)

    COMPILING = "--compile_model"


CASES = {
    "olmo2": KernelCase(objective="dpo", family=OLMO_2, shared=True, passes=(True, False)),
    "olmo3": KernelCase("--record_entropy", objective="grpo", family=OLMO),
    "qwen3": KernelCase("--teacher_model_name_or_path none", objective="distill", family=QWEN),
    "llama": KernelCase("--activation_checkpointing full", objective="dpo", family=LLAMA),
}


def compiled(case: KernelCase, folder: Path, assembled: list[Kernel]) -> dict[str, Any]:
    """What the compiler made of a step, and of passes over rows that are scored alone.

    kernels: as `Kernel` describes them. versions: of a block for each size of window, and of the
    head's loss. fallbacks: functions that it gave up. graph_breaks: where it left what it compiles,
    with the reasons.
    """
    import torch
    from torch._dynamo.utils import counters

    from open_instruct.models import compiled as versions
    from open_instruct.models.heads.logprob_head import compute_label_losses
    from open_instruct.training.model.forward import token_logprobs
    from tests.unit.training.test_compiled import row, versions_of, versions_of_blocks

    torch.compiler.reset()
    counters.clear()
    num_before, fallbacks = len(assembled), versions.FALLBACKS.count
    with opened(case, folder) as (policy, take_steps):
        take_steps()
        rng = random.Random(0)
        with torch.no_grad():
            for shares in case.passes:
                token_logprobs(
                    policy.model, row(rng, shares=shares), device=torch.device("cuda", 0)
                )
        windows = {block.attention.backend.window_size for block in policy.model.blocks.values()}
        return {
            "kernels": [asdict(kernel) for kernel in assembled[num_before:]],
            "versions": {
                "block": versions_of_blocks(policy.model) / len(windows),
                "head": versions_of(compute_label_losses),
            },
            "fallbacks": versions.FALLBACKS.count - fallbacks,
            "graph_breaks": dict(counters["graph_break"]),
        }


def found(names: Iterable[str]) -> dict[str, Any]:
    """Of each case what `compiled` returns, or the `error` that it ended in."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        set_compiler_environment(folder)
        load_hooks(folder)
        pretend_cuda()
        assembled = pretend_compiler()
        leave_weights_alone()
        for name in names:
            try:
                results[name] = compiled(CASES[name], folder / name, assembled)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    return results


def table(results: dict[str, Any]) -> str:
    """A line for each kernel, with the least and the most of its variants."""
    lines = [f"{'kernel':72}{'variants':>9}{'registers':>11}{'spilled':>9}{'shared':>8}"]
    for name, result in results.items():
        if "error" in result:
            lines.append(f"{name}: {result['error'].splitlines()[-1]}")
            continue
        lines.append(f"{name}: {result['versions']}, {len(result['kernels'])} kernels")
        for kernel, group in groupby(result["kernels"], lambda each: each["name"]):
            variants = list(group)
            registers = [each["registers"] for each in variants]
            most = [
                max(each[what] for each in variants) for what in ("spilled_bytes", "shared_bytes")
            ]
            lines.append(
                f"{shortened(kernel):72}{len(variants):>9}{min(registers):>7}-{max(registers):<3}{most[0]:>9}{most[1]:>8}"
            )
    return "\n".join(lines)


def shortened(name: str, width: int = 70) -> str:
    return name if len(name) <= width else f"{name[: width - 20]}...{name[-17:]}"


def main(words: Sequence[str]) -> None:
    results = found([word for word in words if word != "--json"] or CASES)
    print(json.dumps(results) if "--json" in words else table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
