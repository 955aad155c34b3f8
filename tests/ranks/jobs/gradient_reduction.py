"""The gradients of a step of DPO, reduced after every microbatch and after the last, in the same
ranks.
"""

import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from open_instruct.batching.steps import collate
from open_instruct.commands.run_flags import parse_run
from open_instruct.core.batch_values import PreferenceValues
from open_instruct.core.records import Batch, Document, Span, StepBatch
from open_instruct.models.shards import local_part
from open_instruct.objectives.dpo import DPO, DPOConfig
from open_instruct.parallel.process import stop_process
from open_instruct.run.opening import join_run
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.olmo_core.fsdp2 import build_backend
from open_instruct.training.policy import Policy
from tests.ranks.collectives import RecordCollectives
from tests.unit.token_data import shape_of

ROWS_OF_MICROBATCHES = (3, 1, 0)
"""The last one is what a rank has that got no rows: it learns nothing, and all the same reduces
what others do.
"""

Gradients = list[torch.Tensor]


def compare_each(cases: list[list[str]], ports: list[int]) -> list[dict[str, Any]]:
    """Of each case, given by its flags: see `_compare`."""
    results = []
    for flags, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(_compare(parse_run(DPOConfig, flags)))
        stop_process()
    return results


def _compare(config: DPOConfig) -> dict[str, Any]:
    """difference: of a parameter's gradient, the largest relative one; norm: of all, before
    clipping, both ways.

    leaves_nothing: whether a step without an update before it changes nothing; `reduce_scatters`:
    both ways.
    """
    assert DPO.validate(config) is not None
    run = join_run(config)
    pretrained = open_pretrained(config, run.directory.hf_model)
    backend = build_backend(pretrained, run=run, config=config, num_steps=2)
    assert backend.reduces_last
    policy = Policy(backend, DPO.bind(config))
    policy._check_first_loss = lambda loss, counts: None  # type: ignore[method-assign]  # the reference log-probs are made up
    data_rank = dist.get_rank(policy.dp_process_group)
    microbatches = tuple(
        _microbatch(
            num_rows, seed=10 * data_rank + index, multiple_of=run.layout.model_parallel_degree
        )
        for index, num_rows in enumerate(ROWS_OF_MICROBATCHES)
    )
    num_rows = sum(ROWS_OF_MICROBATCHES) * run.layout.data_parallel_world_size
    step = StepBatch(microbatches=microbatches, counts={"rows": num_rows, "tokens": 1, "labels": 1})
    (last, norm, calls), (again, *_) = (
        _gradients(policy, step, reduces_last=True) for _ in range(2)
    )
    every, norm_of_every, calls_of_every = _gradients(policy, step, reduces_last=False)
    relative = [
        (a - b).norm() / b.norm() for a, b in zip(last, every, strict=True) if b.numel() and b.any()
    ]
    return {
        "difference": float(max(relative)),
        "norm": [norm, norm_of_every],
        "leaves_nothing": all(torch.equal(a, b) for a, b in zip(last, again, strict=True)),
        "reduce_scatters": [calls, calls_of_every],
    }


def _gradients(
    policy: Policy, step: StepBatch, *, reduces_last: bool
) -> tuple[Gradients, float, int]:
    """This rank's shards of them, clipped; their norm before that; reduce-scatters that they
    took.
    """
    policy.backend.reduces_last = reduces_last  # type: ignore[attr-defined]
    policy.backend.zero_grads()
    with RecordCollectives() as recorder:
        policy.forward_backward(step)
    calls = sum(
        times for kind, times in recorder.issued.items() if kind.collective == "reduce_scatter"
    )
    gradients = [local_part(parameter.grad).clone() for parameter in policy.model.parameters()]  # type: ignore[arg-type]
    return gradients, policy._grad_norm, calls


def _microbatch(num_rows: int, *, seed: int, multiple_of: int) -> Batch:
    """So many pairs of random tokens, which share their prompts."""
    chance = random.Random(seed)

    def draw(least: int, most: int) -> tuple[int, ...]:
        return tuple(chance.randrange(3, 250) for _ in range(chance.randint(least, most)))

    rows = []
    for _ in range(num_rows):
        prompt, replies = draw(8, 16), (draw(2, 12), draw(2, 12))
        documents = [
            Document(
                token_ids=prompt + reply,
                responses=(Span(start=len(prompt), stop=len(prompt + reply)),),
            )
            for reply in replies
        ]
        rows.append(tuple(documents))
    reference_logps_N2 = np.full((max(num_rows, 1), 2), -30.0, dtype=np.float32)
    shape = shape_of(documents_per_sample=2, pad_to_multiple_of=multiple_of, prefix_sharing="on")
    return collate(
        rows,
        tuple(range(num_rows)),
        shape=shape,
        reference_logps_ND=reference_logps_N2,
        values_class=PreferenceValues,
    )
