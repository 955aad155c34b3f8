"""How long the parts of a step take, and how much of the device's arithmetic a step makes use of."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.planning.subject.devices import DEVICES

Moment = float | torch.cuda.Event


class StepClock:
    """Adds up the time of named parts of a step, the device's own where it is a GPU: nobody waits for that."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, Moment, Moment]] = []

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        began = self._now()
        yield
        self._spans.append((part, began, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds by `time/PART` since the last call, of all that the device is done with; the rest comes next time."""
        read, left = defaultdict[str, float](float), []
        for span in self._spans:
            seconds = _seconds_between(*span[1:])
            if seconds is None:
                left.append(span)
            else:
                read[f"time/{span[0]}"] += seconds
        self._spans = left
        return dict(read)

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(began: Moment, ended: Moment) -> float | None:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert not isinstance(began, float) and not isinstance(ended, float), "of one clock"
    return began.elapsed_time(ended) / 1000 if ended.query() else None


def peak_flops_per_second(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU whose published numbers are known here."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((known.peak_tflops_bf16 * 1e12 for short, known in DEVICES.items() if short in name), None)


def flops_of_step(model: Transformer, counts: Mapping[str, int], *, mean_length: int) -> int:
    """FLOPs of forward and backward as OLMo-core counts them, without what is computed again or shared.

    :param counts: of all ranks: `tokens` go through the blocks, `labels` through the head.
    :param mean_length: of a document, for attention.
    """

    def flops(module: Any) -> int:
        """What is frozen has no gradient of its own, which is two of the six a weight."""
        frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
        of_all: int = module.num_flops_per_token(mean_length)
        return of_all - 2 * frozen

    return counts["tokens"] * sum(map(flops, model.blocks.values())) + counts["labels"] * flops(model.lm_head)
