"""What it saves to compute a shared prompt once: forward and backward of the same rows padded,
packed, and shared.

    python benchmarks/prefix_sharing.py
    python benchmarks/prefix_sharing.py --size mini [--rows PAIRS.jsonl] [--prompts PROMPTS.jsonl]
    python benchmarks/prefix_sharing.py --only "a tree"
    python benchmarks/prefix_sharing.py --device cuda --size olmo2-1b --scale 4

Made-up pairs whose prompt is as long as a reply (goal: 1.3 times the tokens of rows a second of
packing), made-up groups of 8 completions whose prompt is 4 times as long (goal: 0.7 of what the
tokens that are left allow, (G P + G R) / (P + G R)), a tree of 8 episodes of three turns that
branch in two at each (goal: 0.85 of what its distinct positions allow), and pairs of which nothing
can be shared (goal: no more than 3% lost). --rows adds real preference pairs, and --prompts
problems behind 8 solved ones, each with the solutions of 8 other problems in place of completions.
Activations are what the forward pass keeps for the backward pass. --profile also says what the time
of packed and of shared rows goes into. The exit code is 1 where a goal is missed.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from harness.memory import MIB
from harness.program import parser_of
from harness.rounds import in_turns, paired_median
from olmo_core.nn.transformer import Transformer
from sharing_runs.cost import activation_bytes, forward_backward, print_profile, random_model, timed
from sharing_runs.rows import (
    Rows,
    made_up_groups,
    made_up_pairs,
    made_up_tree,
    real_groups,
    real_pairs,
)

from open_instruct.batching.documents import pack_documents
from open_instruct.batching.prefixes import split_unshared_groups
from open_instruct.commands.tiny_model import SIZES, write_tiny_model
from open_instruct.core.families import FAMILIES
from open_instruct.core.records import PackedBatch


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--family", choices=FAMILIES, default="olmo2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--scale", type=int, default=1, help="times the length of the made-up rows")
    parser.add_argument("--rows", type=Path, help="real preference pairs")
    parser.add_argument(
        "--prompts", type=Path, help="problems with the fields 'messages' and 'solution'"
    )
    parser.add_argument(
        "--only", default="", help="of the cases, those whose names have this in them"
    )
    parser.add_argument("--num_rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    device = torch.device(args.device)

    with tempfile.TemporaryDirectory(prefix="prefix_sharing_") as name:
        folder = Path(name)
        checkpoint = write_tiny_model(folder / "model", family=args.family, size=args.size)
        model = random_model(checkpoint, device)
        cases = [
            made_up_pairs(args.scale, with_prompt=True),
            made_up_groups(args.scale),
            made_up_tree(args.scale),
            made_up_pairs(args.scale, with_prompt=False),
        ]
        if args.rows is not None:
            cases.append(real_pairs(args.rows, checkpoint, folder))
        if args.prompts is not None:
            cases.append(real_groups(args.prompts, checkpoint))
        missed = []
        for case in (case for case in cases if args.only in case.name):
            batches = layouts(case)
            if not compare(model, case, batches, num_rounds=args.num_rounds, device=device):
                missed.append(case.name)
            if args.profile:
                print_profile(model, batches, device)
    for case_name in missed:
        print(f"missed: {case_name}")
    return int(bool(missed))


def layouts(rows: Rows) -> dict[str, PackedBatch]:
    return {
        "padded": pack_documents(rows.documents, packing=False),
        "packed": pack_documents(rows.documents),
        "shared": pack_documents(
            rows.documents, groups=split_unshared_groups(rows.documents, rows.groups, "auto")
        ),
    }


def compare(
    model: Transformer,
    rows: Rows,
    batches: dict[str, PackedBatch],
    *,
    num_rounds: int,
    device: torch.device,
) -> bool:
    """Time the three layouts in turns and print them; whether the goal was met."""

    def way(batch: PackedBatch) -> Callable[[int], float]:
        return lambda _: timed(lambda: forward_backward(model, batch, device), device)

    ways = {name: way(batch) for name, batch in batches.items()}
    seconds = in_turns(ways, num_rounds=num_rounds, num_warmup_rounds=1)
    best = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"\n{rows.name}: {len(rows.documents)} documents, {rows.num_tokens:,} tokens", flush=True)
    for name, batch in batches.items():
        rate, computed = rows.num_tokens / best[name], batch.input_ids_BT.numel()
        memory = activation_bytes(model, batch, device)
        print(
            f"  {name}  {rate:9,.0f} tokens of rows/s  {best['packed'] / best[name]:5.2f}x packed "
            f" {best['padded'] / best[name]:5.2f}x padded  {computed:7,} positions  "
            f"{memory / MIB:8,.1f} MiB kept"
        )
    ratio = paired_median(seconds["packed"], seconds["shared"])
    # The last token that documents begin with is computed in each, so a few more positions than the
    # distinct ones.
    bound, excess = (
        rows.num_tokens / rows.num_distinct,
        rows.num_distinct / batches["shared"].num_tokens,
    )
    told = (
        f"  shared over packed: {ratio:.2f}x, {ratio / bound:.2f} of the bound of {bound:.2f}x "
        "that the "
    )
    told += f"{rows.num_distinct:,} distinct positions set; they are {excess:.3f} of those computed"
    print(told if rows.goal is None else f"{told} (goal {rows.goal:.2f}x)")
    return rows.goal is None or ratio >= rows.goal


if __name__ == "__main__":
    sys.exit(main())
