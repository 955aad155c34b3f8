"""A language-model head that never holds the logits of a whole microbatch.

B rows, K label positions kept, D width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.lm_head import LMHead, LMOutputWithLoss
from olmo_core.nn.transformer import Transformer, TransformerConfig
from torch.utils.checkpoint import checkpoint

MAX_LOGITS_BYTES = 1 << 30


class LogprobHead(LMHead):
    """OLMo-core's head, with the per-label loss computed chunk by chunk where the logits would be large.

    The logits of K positions over V words, in float32 and with their gradient, outgrow everything else
    in a long microbatch. Chunks of at most `max_logits_bytes` are computed one at a time and computed again in
    the backward pass, which costs one more product with the head's matrix. Parameters, their names,
    and every other way of calling the head are those of `LMHead`.
    """

    max_logits_bytes = MAX_LOGITS_BYTES

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor | LMOutputWithLoss:
        """See `LMHead.forward`; chunked when only the unreduced loss of given labels is asked for."""
        labels, keep = kwargs.get("labels"), kwargs.get("logits_to_keep")
        wants_loss_alone = kwargs.get("loss_reduction") == "none" and kwargs.get("return_logits") is False
        if labels is None or not wants_loss_alone or not isinstance(keep, torch.Tensor) or self.tp_enabled:
            return super().forward(x, **kwargs)
        num_rows = max(1, self.max_logits_bytes // (4 * self.vocab_size))
        if keep.numel() <= num_rows:
            return super().forward(x, **kwargs)

        h_BKD = (x if self.norm is None else self.norm(x)).gather(1, keep.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        labels_BK = labels.gather(1, keep)
        losses = [
            checkpoint(self._losses, h, target, kwargs["ignore_index"], use_reentrant=False)
            for h, target in zip(h_BKD.flatten(0, 1).split(num_rows), labels_BK.flatten().split(num_rows), strict=True)
        ]
        loss_BK = torch.cat(losses).view_as(labels_BK)
        return LMOutputWithLoss(logits=None, loss=loss_BK, ce_loss=loss_BK.detach(), z_loss=None)

    def _losses(self, h_ND: torch.Tensor, labels_N: torch.Tensor, ignore_index: int) -> torch.Tensor:
        logits_NV = self.w_out(h_ND).float()
        return F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="none")


def install_logprob_head(model: Transformer, config: TransformerConfig, *, init_device: str) -> None:
    """Give `model`, before it is sharded, a `LogprobHead` in place of the head it was built with."""
    head = config.lm_head
    model.lm_head = LogprobHead(
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        layer_norm=head.layer_norm,
        dtype=head.dtype.as_pt(),
        bias=bool(head.bias),
        init_device=init_device,
    )
    if model.tie_word_embeddings:
        model._tie_weights()
