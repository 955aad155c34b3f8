"""A language-model head that never holds the logits of a whole microbatch.

B rows, K kept label positions (all T of a row where none are chosen), N positions of a chunk, D
width of the model, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from olmo_core.distributed.utils import get_local_tensor
from olmo_core.nn.lm_head import LMHead
from olmo_core.utils import mark_dynamic
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

MAX_LOGITS_BYTES = 1 << 30
MAX_KEPT_BYTES = 2 << 30
MEASURED_SHARE = 8
"""Measures of logits may need several tensors of the logits' size: chunks are smaller by this
factor.
"""


class Measure(NamedTuple):
    """An extra value to be computed from the logits of every position.

    `function(logits_NV, *beside_N)` is given some positions' logits and the same positions of every
    tensor of `beside`, whose first two axes are (B, K): of the rank's own positions. It returns a
    value, or a row of values, for each.
    """

    function: Callable[..., torch.Tensor]
    beside: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """The temperature of the logits, and the values to compute beside the loss, see `LabelLosses`.

    If `temperature` is a tensor, it has one value for each of the rank's own positions, (B, K).
    With `only_hidden` the head returns the hidden states that logits are computed from.

    A forward pass is given it by a function: FSDP casts every tensor that it finds in an argument,
    also in records.

    Example: `HeadSettings(temperature=0.7, with_entropy=True)`.
    """

    temperature: float | torch.Tensor = 1.0
    with_entropy: bool = False
    with_collisions: bool = False
    measure: Measure | None = None
    only_hidden: bool = False


class LabelLosses(NamedTuple):
    """-log p of every label (nats, 0 where there is none), and the requested values of every
    position.

    These are the entropy, log(sum over v of p(v)^2), and the result of the `Measure`. All have
    shape (B, K); a measure may have one more axis. Under tensor parallelism they are DTensors split
    along K. Only `loss` and `measured` have a gradient.
    """

    loss: torch.Tensor
    entropy: torch.Tensor | None
    collision_logprobs: torch.Tensor | None
    measured: torch.Tensor | None


class LogprobHead(LMHead):
    """OLMo-core's head, with the per-label loss computed chunk by chunk where the logits would be
    large.

    The logits of K positions over V words, in float32 and with their gradient, outgrow everything
    else in a long microbatch. Chunks of at most `max_logits_bytes` are computed one at a time and
    computed again in the backward pass, which costs one more product with the head's matrix. On a
    GPU the first chunks keep that product, `max_kept_bytes` of it in the dtype that is computed in.
    Parameters, their names, and every other way of calling the head are those of `LMHead`.
    """

    max_logits_bytes = MAX_LOGITS_BYTES
    max_kept_bytes = MAX_KEPT_BYTES
    # Replaces `compute_label_losses` where the model is compiled.
    compute_losses: (
        Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] | None
    ) = None
    tp_mesh: DeviceMesh | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the loss alone, and not the Python around it."""
        self.compute_losses = compile_label_losses()

    def apply_tp(self, tp_mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        super().apply_tp(tp_mesh, *args, **kwargs)
        self.tp_mesh = tp_mesh

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        """As `LMHead.forward`, but `LabelLosses` for the unreduced loss of labels without logits.

        :param kwargs: those of `LMHead`, and `settings`, a function that returns a `HeadSettings`.
        """
        make_settings = kwargs.pop("settings", None) or HeadSettings
        settings: HeadSettings = make_settings()
        labels = kwargs.get("labels")
        if (
            labels is None
            or kwargs.get("loss_reduction") != "none"
            or kwargs.get("return_logits") is not False
        ):
            return super().forward(x, **kwargs)
        h_BKD = x if self.norm is None else self.norm(x)
        keep_BK = kwargs.get("logits_to_keep")
        if isinstance(keep_BK, torch.Tensor):
            assert not self.tp_enabled, (
                "hidden states are split along T: no rank has all positions to choose from"
            )
            h_BKD = h_BKD.gather(1, keep_BK.unsqueeze(-1).expand(-1, -1, h_BKD.size(-1)))
            labels = labels.gather(1, keep_BK)
        # Under tensor parallelism these are the rank's own positions. Every rank has equally many,
        # so all cut them into the same chunks and meet in the head's collectives.
        h_BKD = get_local_tensor(h_BKD)
        labels_BK = get_local_tensor(labels)
        if settings.only_hidden:
            return self._join((h_BKD.flatten(0, 1),), labels_BK)
        beside: tuple[torch.Tensor, ...] = ()
        max_bytes = self.max_logits_bytes
        if settings.measure is not None:
            beside = settings.measure.beside
            max_bytes //= MEASURED_SHARE
        if isinstance(settings.temperature, torch.Tensor):
            beside = (*beside, settings.temperature)
        num_positions = max(1, max_bytes // (4 * self.vocab_size))
        losses: Callable[..., Any] = partial(
            self._losses, ignored=kwargs.get("ignore_index", -100), settings=settings
        )
        if labels_BK.numel() > num_positions:
            losses = partial(checkpoint, losses, use_reentrant=False)
        split = [
            tensor.flatten(0, 1).split(num_positions) for tensor in (h_BKD, labels_BK, *beside)
        ]
        num_kept = self._count_kept(h_BKD, num_positions)
        parts = [
            losses(self._make_product(h_ND, is_kept=index < num_kept), *others)
            for index, (h_ND, *others) in enumerate(zip(*split, strict=True))
        ]
        joined: list[Any] = []
        for chunks in zip(*parts, strict=True):
            joined.append(None if chunks[0] is None else self._join(chunks, labels_BK))
        return LabelLosses(*joined)

    def _count_kept(self, h_BKD: torch.Tensor, num_positions: int) -> int:
        """Count the chunks, of so many positions, that keep their product.

        Tensor ranks would keep what they gather.
        """
        if not h_BKD.is_cuda or self.tp_mesh is not None:
            return 0
        return self.max_kept_bytes // (num_positions * self.vocab_size * h_BKD.itemsize)

    def _make_product(self, h_ND: torch.Tensor, *, is_kept: bool) -> Any:
        """The logits, or the call that makes them where the loss is recomputed."""
        if is_kept:
            return self._multiply(h_ND)
        return partial(self._multiply, h_ND)

    def _multiply(self, h_ND: torch.Tensor) -> torch.Tensor:
        """The logits, (N, V)."""
        if self.tp_mesh is None:
            return cast(torch.Tensor, self.w_out(h_ND))
        h_1ND = DTensor.from_local(h_ND.unsqueeze(0), self.tp_mesh, (Shard(1),), run_check=False)
        return get_local_tensor(self.w_out(h_1ND)).squeeze(0)

    def _losses(
        self,
        product: torch.Tensor | Callable[[], torch.Tensor],
        labels_N: torch.Tensor,
        *beside_N: torch.Tensor,
        ignored: int,
        settings: HeadSettings,
    ) -> LabelLosses:
        logits_NV = product if isinstance(product, torch.Tensor) else product()
        temperature = settings.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = beside_N[-1].unsqueeze(-1)
            beside_N = beside_N[:-1]
        if settings.measure is not None or isinstance(temperature, torch.Tensor):
            logits_NV = _scale_logits(logits_NV, temperature)
            temperature = 1.0
        measured = None
        if settings.measure is not None:
            measured = settings.measure.function(logits_NV, *beside_N)
        compute_losses = self.compute_losses or compute_label_losses
        losses = compute_losses(
            logits_NV,
            labels_N,
            ignored,
            temperature,
            settings.with_entropy,
            settings.with_collisions,
        )
        return LabelLosses(*losses, measured)

    def _join(self, parts: tuple[Any, ...], labels_BK: torch.Tensor) -> torch.Tensor:
        values_BK = torch.cat(parts).unflatten(0, labels_BK.shape)
        if self.tp_mesh is not None:
            return DTensor.from_local(values_BK, self.tp_mesh, (Shard(1),), run_check=False)
        return values_BK

    def select_local_positions(self, values_BT: torch.Tensor) -> torch.Tensor:
        """The values at the positions whose logits this rank computes; further axes may follow."""
        if self.tp_mesh is None:
            return values_BT
        return values_BT.chunk(self.tp_mesh.size(), dim=1)[self.tp_mesh.get_local_rank()]


def compute_label_losses(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    ignored: int,
    temperature: float,
    with_entropy: bool,
    with_collisions: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """-log p of labels with gradient, and entropy and collisions without, from one log-softmax."""
    logprobs_NV = _scale_logits(logits_NV, temperature).log_softmax(dim=-1)
    # Computed first, because recomputation of a chunk stops at the last tensor that the backward
    # pass needs.
    loss_N = F.nll_loss(logprobs_NV, labels_N, ignore_index=ignored, reduction="none")
    logprobs_NV = logprobs_NV.detach()
    entropy_N = None
    if with_entropy:
        entropy_N = -logprobs_NV.exp().mul_(logprobs_NV).sum(dim=-1)
    collisions_N = None
    if with_collisions:
        collisions_N = (2.0 * logprobs_NV).logsumexp(dim=-1)
    return loss_N, entropy_N, collisions_N


def compile_label_losses() -> Callable[..., Any]:
    """Compile `compute_label_losses` in one version for any number of positions."""
    compiled = torch.compile(compute_label_losses)

    def compute_losses(logits_NV: torch.Tensor, labels_N: torch.Tensor, *settings: Any) -> Any:
        for tensor in (logits_NV, labels_N):
            mark_dynamic(tensor, 0, strict=False)
        return compiled(logits_NV, labels_N, *settings)

    return compute_losses


def _scale_logits(logits_NV: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    logits_NV = logits_NV.float()
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
        logits_NV = logits_NV / temperature
    return logits_NV
