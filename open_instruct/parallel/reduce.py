"""Combines the metrics of microbatches, reduces them over ranks, and gathers rows of all ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.distributed as dist

from open_instruct.core.records import Metric
from open_instruct.parallel.process import gather_objects


def combine_microbatches(microbatches: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine each metric of an update's microbatches, on this rank alone.

    No device is waited for.
    """
    by_name: dict[str, list[Metric]] = {}
    for metrics in microbatches:
        for name, metric in metrics.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _combine(metrics) for name, metrics in by_name.items()}


def _combine(metrics: Sequence[Metric]) -> Metric:
    if metrics[0].reduction != "mean":
        return reduce(_combine_two, metrics)
    weight = sum(each.weight for each in metrics)
    if not weight:
        return Metric(value=0.0, weight=weight)
    return Metric(value=sum(each.value * each.weight for each in metrics) / weight, weight=weight)


def _combine_two(one: Metric, other: Metric) -> Metric:
    combine = torch.add if one.reduction == "sum" else torch.maximum
    return replace(one, value=combine(torch.as_tensor(one.value), torch.as_tensor(other.value)))


def reduce_metrics(
    metrics: Mapping[str, Metric], *, group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Reduce `metrics` over `group` and return plain numbers, the same on every rank.

    Every rank must bring the same names. A mean travels as (sum of value x weight, sum of weight),
    a maximum as one slot a rank, so that a single summing all-reduce serves all three. A mean over
    no weight at all is NaN.
    """
    if not metrics:
        return {}
    world_size = 1
    rank = 0
    if dist.is_initialized():
        world_size = dist.get_world_size(group)
        rank = dist.get_rank(group)
    names = sorted(metrics)
    slots = []
    for name in names:
        slots.append(_slots(metrics[name], rank=rank, world_size=world_size, device=device))
    flat = torch.cat(slots)
    if world_size > 1:
        dist.all_reduce(flat, group=group)
    sums = flat.tolist()  # the one wait for the device
    numbers = {}
    begin = 0
    for name, rank_slots in zip(names, slots, strict=True):
        end = begin + len(rank_slots)
        numbers[name] = _read_number(metrics[name], sums[begin:end])
        begin = end
    return numbers


def _slots(
    metric: Metric,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
) -> torch.Tensor:
    """The numbers of a metric on one rank; `_read_number` reads their sums over all ranks."""
    value = _number(metric.value, device)
    if metric.reduction == "sum":
        return value
    if metric.reduction == "max":
        return torch.where(torch.arange(world_size, device=device) == rank, value, 0.0)
    weight = _number(metric.weight, device)
    # A rank without data may bring NaN with weight 0, which must not reach the sum.
    return torch.cat([torch.where(weight > 0, value * weight, 0.0), weight])


def _read_number(metric: Metric, sums: list[float]) -> float:
    """The number of a metric, from the sums of its slots over all ranks."""
    if metric.reduction == "sum":
        return sums[0]
    if metric.reduction == "max":
        # A NaN counts as the largest; the result of max() would depend on the order.
        return max(sums, key=lambda value: (math.isnan(value), value))
    total, weight_sum = sums
    if weight_sum > 0:
        return total / weight_sum
    return math.nan


def _number(number: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Shape (1,), float64.

    A number of the host is written by a fill, since a copy would wait for the device.
    """
    if isinstance(number, torch.Tensor) and number.device.type == device.type:
        return number.to(torch.float64).reshape(1)
    return torch.full((1,), float(number), dtype=torch.float64, device=device)


def gather_rows(values: torch.Tensor, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows of `values` of all ranks, rank by rank; a rank may bring any number of them.

    The host waits for the other ranks but not for the device.
    """
    sizes = gather_objects(len(values), group)
    if len(sizes) == 1:
        return values
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    all_padded = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(all_padded, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(all_padded, sizes, strict=True)])
