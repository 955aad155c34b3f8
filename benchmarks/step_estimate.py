"""An estimate of a 7B training step on 8 H100s, from what our own steps run, counted without a GPU.

    python benchmarks/step_estimate.py python benchmarks/step_estimate.py --only "dpo, 2 pairs, 4
    times" --flags "--float8_linears tensorwise"

A step is taken on the pretended GPU of `tests/fake_cuda` with one and with two layers, and drawn
out to all of them; what a compiled block runs is read from the graphs that PyTorch's compiler makes
of it. Nothing here is measured: the rates below turn counts into seconds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness import REPOSITORY
from harness.program import parser_of

PEAK_FLOPS = 989e12
PRODUCT_SHARE = 0.70  # of the peak, that large products in bfloat16 reach
# PyTorch's own kernel, FlashAttention 2; FlashAttention 3 reaches about 0.55.
ATTENTION_SHARE = 0.33
MEMORY_BYTES_S = 3.35e12
LINK_BYTES_S = 450e9
LINK_SHARE = 0.75  # of NVLink, that NCCL reaches with 8 GPUs and large messages
LAUNCH_S = 4e-6
WORLD = 8
ADAMW_PASSES = 7 / 4  # four tensors are read and three written; the count has each once
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of one step, by what takes them, and the counts beside.

    Example: of parts {"products": 2.0, "attention": 0.2} and hidden {"collectives": 0.4} a step
    takes 2.2 s.
    """

    useful_flops: float
    run_flops: float
    parts: dict[str, float]
    hidden: dict[str, float]
    launches: int
    num_tokens: int

    @property
    def step_s(self) -> float:
        return max(sum(self.parts.values()), self.launches * LAUNCH_S)

    @property
    def mfu(self) -> float:
        return self.useful_flops / (self.step_s * PEAK_FLOPS)


def count_denominators(name: str, num_layers: int, flags: list[str]) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.speed_runs.steps", name, str(num_layers), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def drawn_out(one: Mapping[str, int], two: Mapping[str, int], num_layers: int) -> dict[str, int]:
    """The counts of so many layers: all of them are alike."""
    assert one != two, "two layers run what one does"
    return {
        name: one.get(name, 0) + (two.get(name, 0) - one.get(name, 0)) * (num_layers - 1)
        for name in {*one, *two}
    }


def total(counts: Mapping[str, int], kind: str, what: str, *phases: str) -> int:
    """The sum of a kind of operation, in all phases or in some."""
    return sum(
        number
        for name, number in counts.items()
        if name.endswith(f": {kind}: {what}") and (not phases or name.startswith(phases))
    )


def attention_flops(case: Any, shape: Any) -> tuple[float, float]:
    """Of all forward and of all backward passes of a step: two products for each pair forward, five
    backward.
    """
    num_documents = case.rows * 2 * case.accumulation if case.objective != "grpo" else case.group
    pairs = case.longest * (case.longest + 1) / 2 * num_documents * shape.num_layers
    return 4 * shape.q_width * pairs, 10 * shape.q_width * pairs


def collectives_s(counts: Mapping[str, int]) -> tuple[float, float]:
    """Seconds of all gathers and reductions of weights and gradients, and of those that nothing
    hides.

    A ring sends (n - 1) / n of the bytes. The first gathers of a step, of the root, of the
    embeddings and of the first block, have nothing before them, and its last reductions nothing
    behind.
    """
    rate = LINK_BYTES_S * LINK_SHARE * WORLD / (WORLD - 1)
    gathered = total(counts, "allgather_base", "bytes")
    reduced = total(counts, "reduce_scatter_base", "bytes")
    ends = counts["bytes at the ends"]
    return (gathered + reduced) / rate, ends / rate


def uncompiled(case: Any, shape: Any, counts: Mapping[str, int]) -> Estimate:
    """Each operation is a kernel, and passes what it reads and writes through memory."""
    forward_attention, backward_attention = attention_flops(case, shape)
    num_attention = total(counts, "varlen_attn", "calls")
    recomputes = num_attention / total(counts, "varlen_attn_backward", "calls")
    products = total(counts, "product", "bf16_flops")
    attention = forward_attention * recomputes + backward_attention
    all_s, shown_s = collectives_s(counts)
    update_s = total(counts, "memory", "bytes", "update", "between") * ADAMW_PASSES / MEMORY_BYTES_S
    parts = {
        "products": products / (PEAK_FLOPS * PRODUCT_SHARE),
        "attention": attention / (PEAK_FLOPS * ATTENTION_SHARE),
        "memory": total(counts, "memory", "bytes", FORWARD, BACKWARD) / MEMORY_BYTES_S,
        "FSDP's copies": total(counts, "copies", "bytes") / MEMORY_BYTES_S,
        "update": update_s,
        "collectives": shown_s,
    }
    useful = 3 * (total(counts, "product", "flops", FORWARD) + forward_attention)
    launches = sum(number for name, number in counts.items() if name.endswith(": calls"))
    num_tokens = counts["tokens"]
    return Estimate(
        useful_flops=useful,
        run_flops=products + attention,
        parts=parts,
        hidden={"collectives": all_s - shown_s},
        launches=launches,
        num_tokens=num_tokens,
    )


def compiled(
    plain: Estimate, ends: Mapping[str, int], passes: Sequence[Any], num_runs: int
) -> Estimate:
    """The same with the graphs that a compiled block runs, so often; what lies outside of blocks
    stays as it was.
    """
    flops = sum(each.product_flops for each in passes) * num_runs + total(
        ends, "product", "bf16_flops"
    )
    memory = sum(each.memory_bytes for each in passes) * num_runs
    memory += total(ends, "memory", "bytes", FORWARD, BACKWARD)
    parts = plain.parts | {
        "products": flops / (PEAK_FLOPS * PRODUCT_SHARE),
        "memory": memory / MEMORY_BYTES_S,
    }
    attention = plain.parts["attention"] * PEAK_FLOPS * ATTENTION_SHARE
    outside = sum(number for name, number in ends.items() if name.endswith(": calls"))
    launches = outside + sum(each.num_kernels for each in passes) * num_runs
    return replace(plain, parts=parts, run_flops=flops + attention, launches=launches)


def estimated(name: str, flags: list[str]) -> tuple[str, Estimate, Estimate]:
    """The checkpointing that the plan takes, and a step of a case without and with compiled
    blocks.
    """
    from benchmarks.speed_runs.blocks import compiled_block
    from benchmarks.speed_runs.steps import CASES
    from open_instruct.planning.plan import make_plan

    case = replace(CASES[name], flags=" ".join([CASES[name].flags, *flags]))
    plan = make_plan(case.setting())
    memory, shape, workload = plan.setting.config.memory, plan.setting.shape, plan.workload
    mode = memory.activation_checkpointing
    modules = list(memory.activation_checkpointing_modules) if mode == "selected_modules" else []
    chosen = ["--activation_checkpointing", mode] if plan.is_chosen else []
    if modules and chosen:
        chosen += ["--activation_checkpointing_modules", *modules]
    one, two = (count_denominators(name, num_layers, [*flags, *chosen]) for num_layers in (1, 2))
    counts, ends = (drawn_out(one, two, num_layers) for num_layers in (shape.num_layers, 0))
    # The root, the embeddings and one block: gathered in bfloat16, reduced in float32.
    counts["bytes at the ends"] = 6 * sum(
        parameter.num_params for unit in shape.units for parameter in unit.parameters
    )
    counts["tokens"] = workload.num_microbatches * workload.tokens_per_microbatch
    plain = uncompiled(case, shape, counts)
    lengths = [case.longest] * (workload.tokens_per_microbatch // case.longest)
    float8 = plan.setting.config.model.float8_linears
    forward, backward = compiled_block(
        case.hf_config(), lengths, recomputed_modules=modules, float8=float8
    )
    passes = [forward, *([forward] if mode in ("full", "offload") else []), backward]
    fused = compiled(plain, ends, passes, shape.num_layers * workload.num_microbatches)
    return " ".join([mode, *(module.removeprefix("blocks.*.") for module in modules)]), plain, fused


def line(words: str, each: Estimate) -> str:
    parts = " ".join(f"{seconds * 1e3:8,.0f}" for seconds in each.parts.values())
    return (
        "  "
        f"{words:<11}{each.run_flops / each.useful_flops:6.2f}{parts}{each.launches:9,}{sum(each.hidden.values()) * 1e3:9,.0f}{each.step_s * 1e3:9,.0f}{each.num_tokens / each.step_s:9,.0f}{each.mfu:7.1%}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--flags", default="", help="further flags of the run, as one word")
    asked = parser.parse_args()

    from benchmarks.speed_runs.steps import CASES

    names = asked.only or [*CASES]
    columns = ("products", "attentn", "memory", "copies", "update", "ends")
    print(
        f"{'ms but for run/useful':13}"
        + " ".join(f"{name:>8}" for name in columns)
        + " launches   hidden     step    tok/s    MFU"
    )
    for name in names:
        mode, *both = estimated(name, asked.flags.split())
        print(f"{name} ({mode})")
        for words, each in zip(("uncompiled", "compiled"), both, strict=True):
            print(line(words, each), flush=True)


if __name__ == "__main__":
    main()
