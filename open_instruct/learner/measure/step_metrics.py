"""Metrics of a step: numbers gathered over microbatches, and the most memory so far."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch

from open_instruct.models.attention.segments import segments_of
from open_instruct.records import Metric, PackedBatch

GIB = 1024**3


class WeightedSums:
    """Metrics gathered over microbatches without a device sync: means by (sum of value x weight, sum of weight)."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor | float, torch.Tensor | float]] = {}
        self._others: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            if metric.reduction == "mean":
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + metric.value * metric.weight, weight + metric.weight)
            elif name not in self._others:
                self._others[name] = metric
            else:
                combine = torch.add if metric.reduction == "sum" else torch.maximum
                value = combine(torch.as_tensor(self._others[name].value), torch.as_tensor(metric.value))
                self._others[name] = replace(metric, value=value)

    def means(self) -> dict[str, Metric]:
        """A `Metric` for each name, with this rank's mean (or sum, or maximum) as its value."""
        return self._others | {
            name: Metric(value=total / weight if weight else 0.0, weight=weight)
            for name, (total, weight) in self._sums.items()
        }


def padding_fraction(packed: PackedBatch) -> Metric:
    """Share of a microbatch's token slots that hold padding."""
    num_slots = packed.input_ids_BT.numel()
    return Metric(value=1.0 - packed.num_tokens / num_slots, weight=float(num_slots))


def shared_fraction(packed: PackedBatch) -> Metric:
    """Share of the documents' tokens that prefix sharing saves: those of every copy of a prompt but the first."""
    num_saved = 0
    if packed.prefix_lengths is not None:
        assert packed.document_lengths is not None
        segments = segments_of(packed.document_lengths, packed.prefix_lengths)
        num_saved = sum(segment.prefix_length for segment in segments if not segment.is_first_branch)
    num_tokens = packed.num_tokens + num_saved
    return Metric(value=num_saved / max(num_tokens, 1), weight=float(num_tokens))


def memory_so_far(device: torch.device) -> dict[str, float]:
    """Most memory this process has held: the device's on CUDA, the host's elsewhere.

    On CUDA also the most that its allocator had reserved, and how often it ran out and freed its cache to try again.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "peak_memory_gib": stats["allocated_bytes.all.peak"] / GIB,
            "peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
            "allocation_retries/max": stats["num_alloc_retries"],
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_memory_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}
