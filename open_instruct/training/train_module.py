"""What one optimisation step over microbatches shares, whatever the loss."""

from __future__ import annotations

import math
import resource
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from olmo_core.distributed.utils import get_world_size
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TransformerTrainModule

from open_instruct.errors import RunError
from open_instruct.models.context_parallel import context_of
from open_instruct.models.segments import segments_of
from open_instruct.parallel.reduce import reduce_metrics
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
        """One `Metric` a name, whose value is this rank's mean (or sum, or maximum)."""
        return self._others | {
            name: Metric(value=total / weight if weight else 0.0, weight=weight)
            for name, (total, weight) in self._sums.items()
        }


class SegmentTrainModule(TransformerTrainModule):
    """OLMo-core's train module with a loss over packed documents instead of next-token prediction.

    A subclass gives `microbatch_loss`. Losses are sums over the microbatch divided by a global
    denominator, so their total over microbatches and ranks is the loss of the global batch however that was cut.
    """

    @abstractmethod
    def microbatch_loss(self, microbatch: Any, step: Any) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Loss of `microbatch` as its share of the global batch (a scalar with gradient), and its metrics."""

    def pre_train(self) -> None:
        # OLMo-core checks here that batches divide evenly in tokens; ours are planned in documents.
        pass

    def global_num_flops_in_batch(self, batch: dict[str, Any]) -> int | None:
        return None

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """Forward and backward over this rank's microbatches, then one all-reduce for all metrics."""
        assert not dry_run, "the loader has no mock batch"
        step = batch["step"]
        self._set_model_mode("train")
        # FSDP averages gradients over the data-parallel ranks; the denominators are global already. Ranks that split a
        # row are averaged over too, while each has only its tokens' part of the row's gradient.
        context = context_of(self.model)
        gradient_scale = get_world_size(self.dp_process_group) * (1 if context is None else context.degree)
        sums = WeightedSums()
        for index, microbatch in enumerate(step.microbatches):
            with self._train_microbatch_context(index, len(step.microbatches)):
                loss, metrics = self.microbatch_loss(microbatch, step)
                (loss * gradient_scale).backward()
            sums.add(metrics)
            packed = microbatch.packed
            sums.add({"padding_fraction": padding_fraction(packed), "shared_fraction": shared_fraction(packed)})
        self.model.post_batch()

        reduced = reduce_metrics(
            sums.means() | {"peak_memory_gib": Metric(value=peak_memory_gib(self.device), reduction="max")},
            group=self.dp_process_group,
            device=self.device,
        )
        self._check(reduced["loss"])
        if isinstance(self.optim, SkipStepOptimizer):
            self.optim.latest_loss = torch.tensor(reduced["loss"], device=self.device)
        for name, value in reduced.items():
            self.trainer.record_metric(name, value)
        self.trainer.record_metric("num_tokens", self.trainer.global_train_tokens_seen)

    def end_step(self) -> None:
        """Called once after the last update of a step that has several."""

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {self.trainer.global_step}: nothing of this step was kept. "
                "Lower --learning_rate, or look at the data of this step; the last checkpoint is unharmed"
            )


def padding_fraction(packed: PackedBatch) -> Metric:
    """Share of a microbatch's token slots that hold padding."""
    num_slots = packed.input_ids_BT.numel()
    return Metric(value=1.0 - packed.num_tokens / num_slots, weight=float(num_slots))


def shared_fraction(packed: PackedBatch) -> Metric:
    """Share of the documents' tokens that lie in a microbatch once for several documents, all but that once."""
    num_saved = 0
    if packed.prefix_lengths is not None:
        assert packed.document_lengths is not None
        segments = segments_of(packed.document_lengths, packed.prefix_lengths)
        num_saved = sum(segment.prefix_length for segment in segments if not segment.is_first_branch)
    num_tokens = packed.num_tokens + num_saved
    return Metric(value=num_saved / max(num_tokens, 1), weight=float(num_tokens))


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held so far: the device's on CUDA, the host's elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB
