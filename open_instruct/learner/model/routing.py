"""How evenly routers spread tokens over experts: metrics of a pass, and the loss that config.json may ask for.

T tokens of a microbatch, E experts, K of them for each token.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.records import Metric, PackedBatch


class Routing:
    """The logits of every router that runs within `routing_of`, layer by layer, with their gradient."""

    def __init__(self, layers: list[RoutedFeedForward]) -> None:
        self.top_k = layers[0].top_k if layers else 0
        self._logits_TE: list[torch.Tensor] = []

    @torch.compiler.disable  # a list outside is no part of a compiled block
    def note(self, logits_TE: torch.Tensor) -> None:
        self._logits_TE.append(logits_TE)

    def of_tokens(self, batch: PackedBatch) -> list[torch.Tensor]:
        """The logits without those of padding at the end of a packed row, unless there is nothing else."""
        is_whole = batch.document_lengths is not None and len(self._logits_TE[0]) == batch.input_ids_BT.numel()
        num_tokens = (is_whole and batch.num_tokens) or None
        return [each[:num_tokens] for each in self._logits_TE]


@contextmanager
def routing_of(model: nn.Module) -> Iterator[Routing]:
    """A context in which the routers of `model` are noted: not those of blocks that a backward pass runs again."""
    layers = [each for each in model.modules() if isinstance(each, RoutedFeedForward)]
    routing = Routing(layers)
    for layer in layers:
        layer.note = routing.note
    try:
        yield routing
    finally:
        for layer in layers:
            layer.note = None


def balance(
    model: nn.Module, routing: Routing, batch: PackedBatch, *, share: float
) -> tuple[torch.Tensor | float, Mapping[str, Metric]]:
    """The microbatch's part of the balance loss, to be added to the objective's, and the metrics of the routers.

    The loss is that of transformers' `load_balancing_loss_func` (Fedus et al. 2021, arXiv:2101.03961, equations 4 to
    6), E * sum over experts of f P, with f the tokens of an expert and P its mean probability over all layers. As it is
    no sum over tokens, that of a step is the mean over its microbatches on all ranks, as transformers' trainer has it.

    :param share: 1 / the number of these microbatches.
    """
    if not routing.top_k:
        return 0.0, {}
    coefficient = cast(SegmentTransformer, model).balance_coefficient
    probs = [logits_TE.softmax(dim=-1, dtype=torch.float32) for logits_TE in routing.of_tokens(batch)]
    with torch.no_grad():
        loads = torch.stack([_tokens_of_experts(probs_TE, routing.top_k) for probs_TE in probs])
        entropy = torch.stack([torch.special.entr(probs_TE).sum(dim=-1).mean() for probs_TE in probs]).mean()
        unevenness = (loads.amax(dim=1) / loads.mean(dim=1)).mean()
    metrics = {"router/entropy": entropy, "router/max_load": unevenness}
    loss: torch.Tensor | float = 0.0
    if coefficient:
        mean_probs_E = torch.stack([probs_TE.mean(dim=0) for probs_TE in probs]).mean(dim=0)
        unscaled = mean_probs_E.numel() * (loads.mean(dim=0) * mean_probs_E).sum()
        metrics["router/balance_loss"] = unscaled.detach()
        loss = coefficient * share * unscaled * bool(batch.num_tokens)
    return loss, {name: Metric(value=value, weight=float(batch.num_tokens)) for name, value in metrics.items()}


def _tokens_of_experts(probs_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """The share of tokens that each expert has; they add up to K."""
    chosen_TK = probs_TE.topk(top_k, dim=-1).indices
    return torch.zeros_like(probs_TE).scatter_(1, chosen_TK, 1.0).mean(dim=0)
