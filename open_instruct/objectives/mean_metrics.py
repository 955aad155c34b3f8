"""Means over the labelled tokens, the rows or the pairs of a microbatch. Legend: N of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from open_instruct.records import Metric

if TYPE_CHECKING:
    import torch


def mean_metrics(values_N: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Means over a microbatch, weighted by how many values it has: none weigh nothing."""
    return {
        name: Metric(value=value_N.sum() / max(value_N.numel(), 1), weight=float(value_N.numel()))
        for name, value_N in values_N.items()
    }
