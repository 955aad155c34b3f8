"""A language-model head that never holds the logits of a whole microbatch.

B rows, K label positions kept (all T of a row where none are chosen), N positions of a chunk, D width of the model,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from olmo_core.distributed.utils import get_local_tensor
from olmo_core.nn.lm_head import LMHead
from olmo_core.nn.transformer import Transformer, TransformerConfig
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

MAX_LOGITS_BYTES = 1 << 30


class HeadSettings(NamedTuple):
    """What logits are divided by, and what is wanted of every position beside the loss: see `LabelLosses`.

    With `classes`, words of the vocabulary, their logits are wanted and nothing else.
    """

    temperature: float = 1.0
    with_entropy: bool = False
    with_collisions: bool = False
    classes: tuple[int, ...] = ()


class LabelLosses(NamedTuple):
    """-log p of every label (nats, 0 where there is none), and what was asked for of every position.

    That is the entropy, and log(sum over v of p(v)^2). All float32 of shape (B, K); under tensor parallelism DTensors
    that are split along K. Only `loss` has a gradient.
    """

    loss: torch.Tensor
    entropy: torch.Tensor | None
    collision_logprobs: torch.Tensor | None


class LogprobHead(LMHead):
    """OLMo-core's head, with the per-label loss computed chunk by chunk where the logits would be large.

    The logits of K positions over V words, in float32 and with their gradient, outgrow everything else
    in a long microbatch. Chunks of at most `max_logits_bytes` are computed one at a time and computed again in
    the backward pass, which costs one more product with the head's matrix. Parameters, their names,
    and every other way of calling the head are those of `LMHead`.
    """

    max_logits_bytes = MAX_LOGITS_BYTES
    settings = HeadSettings()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        """See `LMHead.forward`; `LabelLosses` when only the unreduced loss of given labels is asked for.

        With `classes`, the logits of these words alone: a (B, K) of float32 for each.
        """
        labels = kwargs.get("labels")
        if labels is None or kwargs.get("loss_reduction") != "none" or kwargs.get("return_logits") is not False:
            return super().forward(x, **kwargs)
        h_BKD = x if self.norm is None else self.norm(x)
        keep_BK = kwargs.get("logits_to_keep")
        if isinstance(keep_BK, torch.Tensor):
            assert not self.tp_enabled, "hidden states are split along T: no rank has all positions to choose from"
            h_BKD = h_BKD.gather(1, keep_BK.unsqueeze(-1).expand(-1, -1, h_BKD.size(-1)))
            labels = labels.gather(1, keep_BK)
        if self.settings.classes:
            return self._logits_of_classes(h_BKD)
        # Under tensor parallelism these are the rank's own positions, as many on every rank, so that ranks cut them
        # into the same chunks and meet in the head's collectives.
        h_BKD, labels_BK = get_local_tensor(h_BKD), get_local_tensor(labels)
        num_positions = max(1, self.max_logits_bytes // (4 * self.vocab_size))
        chunks = zip(h_BKD.flatten(0, 1).split(num_positions), labels_BK.flatten().split(num_positions), strict=True)
        settings = (kwargs.get("ignore_index", -100), self.settings)
        is_whole = labels_BK.numel() <= num_positions
        losses = self._losses if is_whole else partial(checkpoint, self._losses, use_reentrant=False)
        parts = [losses(h_ND, labels_N, *settings) for h_ND, labels_N in chunks]
        joined: list[Any] = [None if p[0] is None else self._joined(p, labels_BK) for p in zip(*parts, strict=True)]
        return LabelLosses(*joined)

    def _logits_of_classes(self, h_BKD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert not self.tp_enabled, "flags that ask for both are refused before"
        weight_CD = self.w_out.weight[list(self.settings.classes)]
        return (h_BKD.float() @ weight_CD.float().T).unbind(-1)

    def _losses(
        self, h_ND: torch.Tensor, labels_N: torch.Tensor, ignored: int, settings: HeadSettings
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if self.tp_enabled:
            assert self._tp_mesh is not None
            h_1ND = DTensor.from_local(h_ND.unsqueeze(0), self._tp_mesh, (Shard(1),), run_check=False)
            logits_NV = get_local_tensor(self.w_out(h_1ND)).squeeze(0).float()
        else:
            logits_NV = self.w_out(h_ND).float()
        if settings.temperature != 1.0:
            logits_NV = logits_NV / settings.temperature
        entropy_N = collisions_N = None
        with torch.no_grad():
            if settings.with_entropy:
                logprobs_NV = logits_NV.log_softmax(dim=-1)
                entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
            if settings.with_collisions:
                collisions_N = logits_NV.log_softmax(dim=-1).mul_(2.0).logsumexp(dim=-1)
        return F.cross_entropy(logits_NV, labels_N, ignore_index=ignored, reduction="none"), entropy_N, collisions_N

    def _joined(self, parts: tuple[Any, ...], labels_BK: torch.Tensor) -> torch.Tensor:
        values_BK = torch.cat(parts).view_as(labels_BK)
        if self.tp_enabled:
            assert self._tp_mesh is not None
            return DTensor.from_local(values_BK, self._tp_mesh, (Shard(1),), run_check=False)
        return values_BK


@contextmanager
def head_settings(model: Transformer, settings: HeadSettings) -> Iterator[None]:
    """Within, the model's head divides its logits by the temperature, and gives what is wanted of every position.

    Or the logits of `classes` as they are. A head that gives a score has no settings.

    A backward pass may come after: chunks that are computed again keep the settings of their forward pass.
    """
    head = model.lm_head
    if not isinstance(head, LogprobHead):
        yield
        return
    head.settings = settings
    try:
        yield
    finally:
        head.settings = HeadSettings()


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
