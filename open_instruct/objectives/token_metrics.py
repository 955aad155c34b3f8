"""Means over the labelled tokens of a microbatch. Legend: N labelled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from open_instruct.records import Metric

if TYPE_CHECKING:
    import torch


def token_metrics(values_N: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Means over the tokens of a microbatch, weighted by their number."""
    return {
        name: Metric(value=value_N.sum() / max(value_N.numel(), 1), weight=float(value_N.numel()))
        for name, value_N in values_N.items()
    }
