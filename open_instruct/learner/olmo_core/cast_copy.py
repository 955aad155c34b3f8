"""A copy of the model in the compute dtype, beside the trained float32 model: the masters.

FSDP casts a sharded model unit by unit. On a single device the whole copy stays, and the masters are updated, saved and
exported: an update that is small beside a weight would be lost in bfloat16, but not in float32.
"""

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.models.shards import local_part


class CastCopy:
    """`model` computes for `masters`, which have the same parameters in the same order.

    Gradients of `model` go to the masters as soon as each is whole, and add up there in float32.
    """

    def __init__(self, model: Transformer, masters: Transformer) -> None:
        self.model = model
        self._master_of = dict(zip(model.parameters(), masters.parameters(), strict=True))
        for parameter in self._master_of:
            parameter.register_post_accumulate_grad_hook(self._hand_over)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters' values into `model`."""
        for parameter, master in self._master_of.items():
            local_part(parameter).copy_(local_part(master))

    def _hand_over(self, parameter: torch.Tensor) -> None:
        master, gradient = self._master_of[parameter], parameter.grad  # type: ignore[index]
        assert gradient is not None
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
