"""How evenly routers spread tokens over experts: metrics, and the loss that config.json asks for.

T tokens of a microbatch, E experts, K of them for each token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from open_instruct.config.sections import BalanceScope
from open_instruct.core.errors import InputError
from open_instruct.core.records import Metric, PackedBatch
from open_instruct.models.experts.routed import RoutedFeedForward, Routing
from open_instruct.models.transformer import SegmentTransformer


@contextmanager
def record_routing(
    model: nn.Module, *, with_gradient: bool = True
) -> Iterator[list[RoutedFeedForward]]:
    """A context in which routers note what they decide, but not while blocks are recomputed.

    Passes without gradient are of other models, but where `with_gradient` says that there is none.
    """
    layers = [each for each in model.modules() if isinstance(each, RoutedFeedForward)]
    for layer in layers:
        layer.records_routing = True
        layer.records_with_gradient = with_gradient
    try:
        yield layers
    finally:
        for layer in layers:
            layer.records_routing = False


class StepRouting:
    """The tokens of each expert in a whole step, over its microbatches and the ranks of `group`.

    A step of several microbatches is counted before the first of them is learned, by
    `count_microbatches`; of a single one, its own forward pass tells.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._total_E: torch.Tensor | None = None

    @torch.no_grad()
    def count_microbatches(
        self,
        model: nn.Module,
        batches: Sequence[PackedBatch],
        run_forward: Callable[[PackedBatch], object],
    ) -> None:
        """Run the forward pass of each of a step's microbatches, and count."""
        counts: list[torch.Tensor] = []
        with record_routing(model, with_gradient=False) as layers:
            for batch in batches:
                run_forward(batch)
                counts.append(count_tokens(_without_padding(layers, batch), batch))
        self._total_E = self._reduce(torch.stack(counts).sum(dim=0))

    def find_total(self, counts_E: torch.Tensor) -> torch.Tensor:
        """The counts of the step; `counts_E` are those of the microbatch at hand."""
        if self._total_E is None:
            return self._reduce(counts_E)
        return self._total_E

    def _reduce(self, counts_E: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            dist.all_reduce(counts_E, group=self._group)
        return counts_E


def check_balance_scope(model: nn.Module, scope: BalanceScope) -> None:
    """:raises InputError: the flag is given, and the model's config.json asks for no such loss."""
    if scope == "step" and not cast(SegmentTransformer, model).balance_coefficient:
        raise InputError(
            "--router_balance step: config.json asks for no balance loss of routers "
            "(output_router_logits with router_aux_loss_coef), so nothing reads it; leave it out",
            kind="unread_flag",
        )


def balance(
    model: nn.Module,
    layers: Sequence[RoutedFeedForward],
    batch: PackedBatch,
    *,
    share: float | torch.Tensor,
    step_routing: StepRouting | None = None,
) -> tuple[torch.Tensor | float, Mapping[str, Metric]]:
    """The microbatch's part of the balance loss, and the metrics of the routers.

    The loss, to be added to the objective's, is that of transformers' `load_balancing_loss_func`
    (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), E * sum over experts of f P, with f the
    tokens of an expert and P its mean probability over all layers. As it is no sum over tokens,
    that of a step is the mean over its microbatches on all ranks, as transformers' trainer has it.
    With `step_routing`, f is the whole step's, and so is the loss, however the step is cut: given f
    it is a sum over tokens.

    :param layers: what they have noted of `batch` is taken from them.
    :param share: 1 / the number of these microbatches.
    """
    routings = _without_padding(layers, batch)
    if not routings:
        return 0.0, {}
    probs = [probs_TE for probs_TE, _ in routings]
    expert_choices = [experts_TK for _, experts_TK in routings]
    with torch.no_grad():
        shares = [_count_expert_shares(*routing) for routing in routings]
        loads = torch.stack(shares)
        entropies = [torch.special.entr(probs_TE).sum(dim=-1).mean() for probs_TE in probs]
        entropy = torch.stack(entropies).mean()
    load_ratios = loads.amax(dim=1) / loads.mean(dim=1)  # by layer
    metrics = {"router/entropy": entropy, "router/max_load": load_ratios.mean()}
    forced_experts_TK = layers[0].forced_experts_TK
    if forced_experts_TK is not None:
        differing = [_count_differing(*routing) for routing in routings]
        metrics["router/differing"] = torch.stack(differing).mean()
        num_tokens = len(probs[0])
        is_replayed_T = forced_experts_TK[:num_tokens, 0] >= 0
        metrics["router/replayed"] = is_replayed_T.float().mean()
    loss: torch.Tensor | float = 0.0
    coefficient = cast(SegmentTransformer, model).balance_coefficient
    if coefficient:
        layer_probs = [probs_TE.mean(dim=0) for probs_TE in probs]
        mean_probs_E = torch.stack(layer_probs).mean(dim=0)
        mean_loads_E = loads.mean(dim=0)
        if step_routing is not None:
            counts_E = count_tokens(routings, batch)
            total_E = step_routing.find_total(counts_E.clone())
            num_chosen = total_E.sum().clamp(min=1)  # by all tokens in all layers
            mean_loads_E = (expert_choices[0].shape[1] * total_E / num_chosen).to(
                mean_loads_E.dtype
            )
            share = (counts_E.sum() / num_chosen).to(mean_loads_E.dtype)  # of the step's tokens
        unscaled = mean_probs_E.numel() * (mean_loads_E * mean_probs_E).sum()
        metrics["router/balance_loss"] = unscaled.detach()
        loss = coefficient * share * unscaled * bool(batch.num_tokens)
    weight = float(batch.num_tokens)
    return loss, {name: Metric(value=value, weight=weight) for name, value in metrics.items()}


def _without_padding(layers: Sequence[RoutedFeedForward], batch: PackedBatch) -> list[Routing]:
    """What the layers noted of a microbatch, without its padding unless there is nothing else."""
    routings: list[Routing] = []
    for layer in layers:
        routings += layer.take_routing()
    if not routings:
        return []
    num_rows = len(routings[0][0])
    num_tokens: int | None = None
    if batch.document_lengths is not None and num_rows == batch.input_ids_BT.numel():
        num_tokens = batch.num_tokens or None
    return [(probs_TE[:num_tokens], experts_TK[:num_tokens]) for probs_TE, experts_TK in routings]


@torch.no_grad()
def count_tokens(routings: Sequence[Routing], batch: PackedBatch) -> torch.Tensor:
    """The tokens of each expert in a microbatch, over all layers; 0 without documents."""
    # bincount would have a GPU's host wait.
    counts = [_mark_choices(*routing, dtype=torch.float64).sum(dim=0) for routing in routings]
    return torch.stack(counts).sum(dim=0) * bool(batch.num_tokens)


def _count_expert_shares(probs_TE: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """The share of tokens that each expert has; they add up to K."""
    return _mark_choices(probs_TE, experts_TK).mean(dim=0)


def _mark_choices(
    probs_TE: torch.Tensor, experts_TK: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """1 where a token has an expert and 0 elsewhere, (T, E), in the dtype of `probs_TE` if None."""
    return torch.zeros_like(probs_TE, dtype=dtype).scatter_(1, experts_TK, 1.0)


def _count_differing(probs_TE: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """The share of tokens whose experts are not those that the router would choose."""
    preferred_TK = probs_TE.topk(experts_TK.shape[1], dim=-1).indices
    differs_TK = preferred_TK.sort().values != experts_TK.sort().values
    return differs_TK.any(dim=-1).float().mean()
