"""The frozen policy that the KL penalty measures against: sharded as the policy is, never a full copy."""

from __future__ import annotations

from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.models.build import local_part
from open_instruct.models.load import stream_load
from open_instruct.models.shards import reshard
from open_instruct.training.pretrained import Pretrained
from open_instruct.training.replica import build_replica
from open_instruct.training.run import Run


def build_reference(pretrained: Pretrained, *, run: Run, config: Any) -> Transformer:
    """The start model once more, under the policy's own mesh, without gradients and without an optimizer.

    Call it after the policy is built: the mesh is the policy's.
    """
    model = build_replica(pretrained, run=run, config=config)
    stream_load(model, pretrained.files, pretrained.names)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def polyak_update(reference: Transformer, policy: Transformer, *, alpha: float) -> None:
    """Move the reference towards the policy: reference <- alpha * policy + (1 - alpha) * reference.

    Shard by shard, on every rank by itself. Both are resharded first: the root's parameters stay gathered after
    a forward, and what would be averaged then is not what is kept.
    """
    reshard(reference)
    reshard(policy)
    for ours, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        local_part(ours).lerp_(local_part(theirs).to(ours.dtype), alpha)
