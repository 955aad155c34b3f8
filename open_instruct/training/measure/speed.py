"""The time, the memory and the FLOPs that a step takes."""

import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from olmo_core.distributed.utils import get_local_tensor
from olmo_core.nn.transformer import Transformer

from open_instruct.core.records import Metric, PackedBatch
from open_instruct.models.heads.logprob_head import LogprobHead, compute_label_losses
from open_instruct.models.nf4 import FrozenLinear
from open_instruct.planning.subject.devices import find_gpu

Moment = float | torch.cuda.Event
MAX_PASSES = 256
SHORT_S = 2e-4  # shorter passes measure kernel launches, not the device
GIB = 1024**3
LEAST_TOKENS = 256  # fewer tokens take a GPU as long, since reading the head's matrix dominates


class Span(NamedTuple):
    """One run of a named part of a step."""

    part: Any
    began: Moment
    ended: Moment


class StepClock:
    """Takes the time of named parts of a step.

    On a GPU it does so by CUDA events, without a wait for the device.

    Args:
        device: where the parts run.
        max_spans: the number of spans that wait to be read; default: all.
    """

    def __init__(self, device: torch.device, *, max_spans: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans = deque[Span](maxlen=max_spans)

    @contextmanager
    def timing(self, part: Any) -> Iterator[None]:
        began = self._now()
        yield
        self._spans.append(Span(part, began, self._now()))

    def take_finished(self) -> list[tuple[Any, float]]:
        """Part and seconds of each span that the device has finished since the last call.

        Others come later.
        """
        finished_spans: list[tuple[Any, float]] = []
        unfinished: list[Span] = []
        for span in self._spans:
            duration_s = _seconds_between(span.began, span.ended)
            if duration_s is None:
                unfinished.append(span)
            else:
                finished_spans.append((span.part, duration_s))
        self._spans.clear()
        self._spans.extend(unfinished)
        return finished_spans

    def read(self) -> dict[str, float]:
        """The sums of what the device has finished, by `time/PART`."""
        sums = defaultdict[str, float](float)
        for part, duration_s in self.take_finished():
            sums[f"time/{part}"] += duration_s
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
        self._clock = StepClock(device, max_spans=MAX_PASSES)
        if isinstance(head, LogprobHead) and head.tp_enabled:
            compute_losses = head.compute_losses or compute_label_losses
            head.compute_losses = self._time_calls(compute_losses, _count_logits)
        else:
            # Between the hooks that gather weights.
            head.forward = self._time_calls(head.forward, _count_positions)

    def read(self) -> float | None:
        """Median seconds for a token since the last call; None where all passes are too short."""
        paces: list[float] = []
        for num_tokens, duration_s in self._clock.take_finished():
            if num_tokens >= LEAST_TOKENS and duration_s > SHORT_S:
                paces.append(duration_s / num_tokens)
        if not paces:
            return None
        return median(paces)

    def _time_calls(
        self, function: Callable[..., Any], count_tokens: Callable[..., int]
    ) -> Callable[..., Any]:
        def call(*inputs: Any, **more: Any) -> Any:
            with self._clock.timing(count_tokens(*inputs, **more)):
                return function(*inputs, **more)

        return call


def _count_logits(logits_NV: torch.Tensor, *others: Any) -> int:
    return len(logits_NV)


def _count_positions(
    hidden_BTD: torch.Tensor, *, logits_to_keep: torch.Tensor | int | None = None, **others: Any
) -> int:
    if isinstance(logits_to_keep, torch.Tensor):
        return logits_to_keep.numel()
    return get_local_tensor(hidden_BTD)[..., 0].numel()  # all positions of this rank


def _seconds_between(began: Moment, ended: Moment) -> float | None:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert not isinstance(began, float) and not isinstance(ended, float), "of one clock"
    if not ended.query():
        return None
    return began.elapsed_time(ended) / 1000


def find_peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU whose published numbers are known here."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    if gpu is None or not gpu.has_bf16:
        return None
    return gpu.peak_tflops_bf16 * 1e12


def count_step_flops(model: Transformer, counts: Mapping[str, int], *, mean_length: int) -> int:
    """FLOPs of forward and backward as OLMo-core counts them.

    Recomputation and shared prefixes are left out.

    :param counts: over all ranks: `tokens` go through the blocks, `labels` through the head.
    :param mean_length: mean tokens of a document, for attention.
    """

    def count_token_flops(module: Any) -> int:
        """FLOPs a token: 6 a trained weight, and 4 a frozen one, which has no weight gradient."""
        num_frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
        num_uncounted = 0
        for layer in module.modules():
            if isinstance(layer, FrozenLinear) and layer.in_4_bits:
                # A byte of codes is two weights, and a scale none.
                num_uncounted += layer.codes.numel() - layer.scales.numel()
        num_flops: int = module.num_flops_per_token(mean_length)
        return num_flops - 2 * num_frozen + 4 * num_uncounted

    block_flops = sum(map(count_token_flops, model.blocks.values()))
    head_flops = count_token_flops(model.lm_head)
    return counts["tokens"] * block_flops + counts["labels"] * head_flops


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory that this process has used: of the device on CUDA, of the host elsewhere.

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
    return {"peak_memory_gib": _peak_bytes_of_host() / GIB}


def _peak_bytes_of_host() -> int:
    """The most bytes that this process has had in memory.

    Linux counts into `ru_maxrss` what the process held that started this one, so that a small
    program started by a large one has the large one's peak. VmHWM is this program's alone.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def token_fractions(packed: PackedBatch) -> dict[str, Metric]:
    """Shares of a microbatch: padding of its slots, and tokens that sharing saves its documents."""
    num_slots = packed.input_ids_BT.numel()
    num_document_tokens = packed.num_tokens + packed.num_shared_tokens
    padding = 1.0 - packed.num_tokens / num_slots
    shared_fraction = packed.num_shared_tokens / max(num_document_tokens, 1)
    return {
        "padding_fraction": Metric(value=padding, weight=float(num_slots)),
        "shared_fraction": Metric(value=shared_fraction, weight=float(num_document_tokens)),
    }
