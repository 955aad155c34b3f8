"""GRPO steps whose reference policy follows the policy, stopped and started again on the way."""

import hashlib
import os
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.models.shards import local_part
from open_instruct.parallel.process import stop_process
from tests.ranks.jobs.grpo_steps import Learner, equal


def run_each(cases: list[dict[str, Any]], ports: list[int]) -> list[list[dict[str, Any]]]:
    """What every step of every case left; a case may begin where another one of the same folder
    saved.
    """
    results = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(_run(**case))
    return results


def _run(
    flags: list[str], *, completions: list[int], stop_after: int | None = None
) -> list[dict[str, Any]]:
    """Go on from the newest checkpoint, if there is one;

    `stop_after` so many steps save one and stop.
    """
    learner = Learner(flags, num_steps=len(completions))
    start = [parameter.detach().clone() for parameter in learner.policy.model.parameters()]
    learner.resume(warn=refuse)
    rows = []
    for num_completions in completions[learner.loop.step : stop_after]:
        row = learner.take_step(num_completions)
        policy = learner.policy.model
        beside = learner.policy.reference
        reference = None if beside is None else beside.model
        rows.append(
            {name: row[name] for name in ("loss", "policy_loss", "kl", "grad_norm") if name in row}
            | {
                "step": learner.loop.step,
                "policy": digest(policy),
                "reference": None if reference is None else digest(reference),
                "reference_is_start": reference is not None
                and all(equal(a, b) for a, b in zip(start, reference.parameters(), strict=True)),
            }
        )
    if stop_after is not None:
        learner.save({})
    stop_process()
    return rows


def refuse(warning: str) -> None:
    raise AssertionError(warning)


@torch.no_grad()
def digest(model: Transformer) -> str:
    """Hash of what this rank holds of `model`."""
    bits = hashlib.sha256()
    for name, parameter in model.named_parameters():
        bits.update(
            name.encode() + local_part(parameter).contiguous().view(torch.uint8).numpy().tobytes()
        )
    return bits.hexdigest()
