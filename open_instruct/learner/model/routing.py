"""How evenly routers spread tokens over experts: metrics of a pass, and the loss that config.json may ask for.

T tokens of a microbatch, E experts, K of them for each token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.records import Metric, PackedBatch


@contextmanager
def noted_routers(model: nn.Module) -> Iterator[list[RoutedFeedForward]]:
    """A context in which routers note what they decide: not those of blocks that a backward pass runs again."""
    layers = [each for each in model.modules() if isinstance(each, RoutedFeedForward)]
    for layer in layers:
        layer.is_noted = True
    try:
        yield layers
    finally:
        for layer in layers:
            layer.is_noted = False


def balance(
    model: nn.Module, layers: Sequence[RoutedFeedForward], batch: PackedBatch, *, share: float
) -> tuple[torch.Tensor | float, Mapping[str, Metric]]:
    """The microbatch's part of the balance loss, to be added to the objective's, and the metrics of the routers.

    The loss is that of transformers' `load_balancing_loss_func` (Fedus et al. 2021, arXiv:2101.03961, equations 4 to
    6), E * sum over experts of f P, with f the tokens of an expert and P its mean probability over all layers. As it is
    no sum over tokens, that of a step is the mean over its microbatches on all ranks, as transformers' trainer has it.

    :param layers: what they have noted of `batch` is taken from them.
    :param share: 1 / the number of these microbatches.
    """
    noted = [routing for layer in layers for routing in layer.taken()]
    if not noted:
        return 0.0, {}
    # Padding at the end of a packed row does not count, unless there is nothing else.
    is_whole_row = batch.document_lengths is not None and len(noted[0][0]) == batch.input_ids_BT.numel()
    num_tokens = (is_whole_row and batch.num_tokens) or None
    probs = [probs_TE[:num_tokens] for probs_TE, _ in noted]
    chosen = [experts_TK[:num_tokens] for _, experts_TK in noted]
    with torch.no_grad():
        loads = torch.stack(list(map(_tokens_of_experts, probs, chosen)))
        entropy = torch.stack([torch.special.entr(probs_TE).sum(dim=-1).mean() for probs_TE in probs]).mean()
    metrics = {"router/entropy": entropy, "router/max_load": (loads.amax(dim=1) / loads.mean(dim=1)).mean()}
    loss: torch.Tensor | float = 0.0
    if coefficient := cast(SegmentTransformer, model).balance_coefficient:
        mean_probs_E = torch.stack([probs_TE.mean(dim=0) for probs_TE in probs]).mean(dim=0)
        unscaled = mean_probs_E.numel() * (loads.mean(dim=0) * mean_probs_E).sum()
        metrics["router/balance_loss"] = unscaled.detach()
        loss = coefficient * share * unscaled * bool(batch.num_tokens)
    return loss, {name: Metric(value=value, weight=float(batch.num_tokens)) for name, value in metrics.items()}


def _tokens_of_experts(probs_TE: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """The share of tokens that each expert has; they add up to K."""
    return torch.zeros_like(probs_TE).scatter_(1, experts_TK, 1.0).mean(dim=0)
