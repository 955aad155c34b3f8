"""The time that parts of a step take, the memory it needs, and its FLOPs beside the device's
peak.
"""

import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from olmo_core.distributed.utils import get_local_tensor
from olmo_core.nn.transformer import Transformer

from open_instruct.models.heads.logprob_head import LogprobHead, compute_label_losses
from open_instruct.models.nf4 import FrozenLinear
from open_instruct.planning.subject.devices import find_gpu

Moment = float | torch.cuda.Event
MOST_PASSES = 256
SHORT_S = 2e-4  # shorter passes measure kernel launches, not the device
GIB = 1024**3
LEAST_TOKENS = 256  # fewer tokens take a GPU as long, since reading the head's matrix dominates


class StepClock:
    """Takes the time of named parts of a step; a GPU's by CUDA events, without a wait for the
    device.

    Args:
        device: where the parts run.
        most: spans that are kept until they are read; default: all.
    """

    def __init__(self, device: torch.device, *, most: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans = deque[tuple[Any, Moment, Moment]](maxlen=most)

    @contextmanager
    def timing(self, part: Any) -> Iterator[None]:
        began = self._now()
        yield
        self._spans.append((part, began, self._now()))

    def finished(self) -> list[tuple[Any, float]]:
        """Part and seconds of each span that the device has finished since the last call; others
        come later.
        """
        spans = [(span, _seconds_between(*span[1:])) for span in self._spans]
        self._spans.clear()
        self._spans.extend(span for span, seconds in spans if seconds is None)
        return [(span[0], seconds) for span, seconds in spans if seconds is not None]

    def read(self) -> dict[str, float]:
        """The sums of what has `finished`, by `time/PART`."""
        sums = defaultdict[str, float](float)
        for part, seconds in self.finished():
            sums[f"time/{part}"] += seconds
        return dict(sums)

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ComputeTimer:
    """Measures the time that this rank takes for a token in the forward pass of the head.

    The head is the part of a step that waits for no other rank: its weights are gathered before it
    begins. Ranks of a tensor-parallel group exchange logits in it, so there only the losses after
    the exchange are timed.
    """

    def __init__(self, head: torch.nn.Module, device: torch.device) -> None:
        self._clock = StepClock(device, most=MOST_PASSES)
        if isinstance(head, LogprobHead) and head.tp_enabled:
            head.compute_losses = self._timed(
                head.compute_losses or compute_label_losses, _num_logits
            )
        else:
            # Between the hooks that gather weights.
            head.forward = self._timed(head.forward, _num_positions)

    def read(self) -> float | None:
        """Median seconds for a token since the last call;

        None where all passes are too short to tell.
        """
        passes = self._clock.finished()
        paces = [
            seconds / num for num, seconds in passes if num >= LEAST_TOKENS and seconds > SHORT_S
        ]
        return median(paces) if paces else None

    def _timed(
        self, function: Callable[..., Any], num_tokens: Callable[..., int]
    ) -> Callable[..., Any]:
        def timed(*inputs: Any, **more: Any) -> Any:
            with self._clock.timing(num_tokens(*inputs, **more)):
                return function(*inputs, **more)

        return timed


def _num_logits(logits_NV: torch.Tensor, *others: Any) -> int:
    return len(logits_NV)


def _num_positions(
    hidden_BTD: torch.Tensor, *, logits_to_keep: torch.Tensor | int | None = None, **others: Any
) -> int:
    if isinstance(logits_to_keep, torch.Tensor):
        return logits_to_keep.numel()
    return get_local_tensor(hidden_BTD)[..., 0].numel()  # all positions of this rank


def _seconds_between(began: Moment, ended: Moment) -> float | None:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert not isinstance(began, float) and not isinstance(ended, float), "of one clock"
    return began.elapsed_time(ended) / 1000 if ended.query() else None


def peak_flops_per_second(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU whose published numbers are known here."""
    known = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.peak_tflops_bf16 * 1e12 if known is not None and known.has_bf16 else None


def flops_of_step(model: Transformer, counts: Mapping[str, int], *, mean_length: int) -> int:
    """FLOPs of forward and backward as OLMo-core counts them, without recomputation and shared
    prefixes.

    :param counts: over all ranks: `tokens` go through the blocks, `labels` through the head.
    :param mean_length: mean tokens of a document, for attention.
    """

    def flops(module: Any) -> int:
        """FLOPs a token: 6 a trained weight, and 4 a frozen one, which has no weight gradient."""
        frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
        in_4_bits = [
            each for each in module.modules() if isinstance(each, FrozenLinear) and each.in_4_bits
        ]
        # A byte of codes is two weights, and a scale none.
        not_counted = sum(each.codes.numel() - each.scales.numel() for each in in_4_bits)
        num_flops: int = module.num_flops_per_token(mean_length)
        return num_flops - 2 * frozen + 4 * not_counted

    return counts["tokens"] * sum(map(flops, model.blocks.values())) + counts["labels"] * flops(
        model.lm_head
    )


def memory_so_far(device: torch.device) -> dict[str, float]:
    """Most memory this process has held: the device's on CUDA, the host's elsewhere.

    On CUDA also the most that its allocator had reserved, and how often it ran out and freed its
    cache to try again.
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
