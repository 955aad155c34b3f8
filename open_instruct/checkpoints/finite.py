"""A model may be written only if all of its weights are finite, and small enough to compute with."""

import math

import torch
from olmo_core.distributed.utils import all_reduce_value
from olmo_core.nn.transformer import Transformer

from open_instruct.errors import RunError
from open_instruct.models.shards import held_of

LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)
"""About 2e19. The square of a larger one is no float32, and norms are computed from squares."""


@torch.no_grad()
def check_weights(model: Transformer, *, what: str, last_checkpoint: str, dtype: torch.dtype = torch.float32) -> None:
    """Look at every weight once, before `what` is written in `dtype`. Collective: all ranks raise, or none.

    :raises RunError: if a weight is not finite, is not finite in `dtype`, or is larger than `LARGEST_WEIGHT`.
    """
    limit = min(LARGEST_WEIGHT, torch.finfo(dtype).max)
    held = [*held_of(model).values(), *held_of(model, adapters_only=True).values()]
    shards = [each.local for each in held if each.local.numel()]
    # A NaN is passed on by each of these, and is not at most the limit. No temporary of a shard's size.
    bounds = torch.stack([bound.float() for shard in shards for bound in shard.aminmax()]) if shards else torch.zeros(1)
    is_broken = (~(bounds.abs().max() <= limit)).float()
    if all_reduce_value(is_broken, next(model.parameters()).device).item():
        raise RunError(
            f"some weights are not finite, or larger than {limit:.0e}, so {what} was not written: start again with a "
            f"lower --learning_rate in another --output_dir. {last_checkpoint}"
        )
