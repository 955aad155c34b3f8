"""Time that a device waits for its batches: built when they are asked for, and built ahead of that.

    python benchmarks/batches_ahead.py
    python benchmarks/batches_ahead.py --device_s 0.5 --microbatches 4

The device is a stand-in: it sleeps for --device_s a step. Steps are of packed preference pairs with
a shared prompt of 512 tokens and replies of 512, 32,768 tokens a microbatch. What a step takes
beyond the sleep is what the device waits.
"""

import time
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from harness.program import parser_of

from open_instruct.batching.steps import BatchShape, build_step_batch
from open_instruct.core.records import StepBatch
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.training.rows.sample_loader import SampleLoader

PROMPT, REPLY, PAIRS_OF_MICROBATCH = 512, 512, 16


def pairs(num_pairs: int) -> TokenDataset:
    lengths = [PROMPT, REPLY, REPLY] * num_pairs
    starts = 3 * np.arange(num_pairs)
    keys = np.zeros((num_pairs, 32), dtype=np.uint8)
    keys[:, :8] = np.arange(num_pairs).view(np.uint8).reshape(num_pairs, 8)
    return TokenDataset(
        documents_per_row=2,
        token_ids_T=(np.arange(sum(lengths)) % 50_000).astype(np.int32),
        edges_E=np.cumsum([0, *lengths]),
        details_C=np.zeros(0, dtype=np.uint8),
        bounds_N4=np.stack([starts, starts + 4, 0 * starts, 0 * starts], axis=1),
        num_tokens=np.full(num_pairs, 2 * (PROMPT + REPLY)),
        num_label_tokens=np.full(num_pairs, 2 * REPLY),
        keys_N32=keys,
    )


def waited_s(steps: Iterable[StepBatch], device_s: float) -> list[float]:
    """Of each step but the first, which nothing precedes."""
    waited, began_s = [], time.perf_counter()
    for _ in steps:
        waited.append(time.perf_counter() - began_s)
        time.sleep(device_s)
        began_s = time.perf_counter()
    return waited[1:]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--device_s", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = pairs(options.steps * options.microbatches * PAIRS_OF_MICROBATCH)
    shape = BatchShape(
        documents_per_sample=2,
        max_samples_per_microbatch=PAIRS_OF_MICROBATCH,
        max_microbatches=options.microbatches,
        max_seq_length=PROMPT + REPLY,
        packing=True,
        prefix_sharing="on",
    )
    size = shape.max_samples_per_rank
    asked_for = (
        build_step_batch(
            rows, [(row,) for row in range(start, start + size)], shape=shape, rank=0, num_ranks=1
        )
        for start in range(0, len(rows), size)
    )
    samples = [(row,) for row in range(len(rows))]
    ahead = SampleLoader(rows, samples, shape=shape, seed=0, dp_group=None).rest_of_epoch()
    plain_s, ahead_s = (
        np.median(waited_s(steps, options.device_s)) for steps in (asked_for, ahead)
    )
    print(
        f"the device waits a step: built when asked for {1e3 * plain_s:.1f} ms, built ahead "
        f"{1e3 * ahead_s:.1f} ms"
    )
    print(f"ratio {ahead_s / plain_s:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
