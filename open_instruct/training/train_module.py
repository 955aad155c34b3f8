"""What one optimisation step over microbatches shares, whatever the loss."""

from __future__ import annotations

import logging
import math
import resource
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TransformerTrainModule

from open_instruct.errors import RunError
from open_instruct.models.context_parallel import context_of
from open_instruct.models.segments import segments_of
from open_instruct.parallel.reduce import reduce_metrics
from open_instruct.records import Metric, PackedBatch
from open_instruct.training.cast_copy import CastCopy
from open_instruct.training.checkpoints import last_checkpoint

log = logging.getLogger(__name__)

GIB = 1024**3
GRAD_NORM = "grad_norm"
# A skip-step optimizer leaves out a step whose gradient is not finite. More than so many in a row are no outliers.
MAX_LEFT_OUT = 10


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

    def __init__(self, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        self._grad_norm = torch.zeros(())
        self._num_left_out = 0
        self._copy: CastCopy | None = None

    def compute_with(self, model: Transformer) -> None:
        """Let `model`, the same in another dtype, run the passes; `self.model` is what is trained. Fill it next."""
        self._copy = CastCopy(model, self.model)

    @property
    def computing_model(self) -> Transformer:
        """The model to call. Its parameters may be in less than float32: what is trained is `model`."""
        return self.model if self._copy is None else self._copy.model

    def refresh_copy(self) -> None:
        """After every change of the weights of `model`."""
        if self._copy is not None:
            self._copy.refresh()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.refresh_copy()

    def _set_model_mode(self, mode: Literal["train", "eval"]) -> None:
        super()._set_model_mode(mode)
        if self._copy is not None:
            self._copy.model.train(mode == "train")

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

        # Clipped here and not in `optim_step`: so the norm is read together with the loss, in one wait for the device.
        assert self.max_grad_norm is not None
        self._grad_norm = super()._clip_grad_norm(self.max_grad_norm)
        reduced = reduce_metrics(
            sums.means()
            | {
                "peak_memory_gib": Metric(value=peak_memory_gib(self.device), reduction="max"),
                GRAD_NORM: Metric(value=self._grad_norm, reduction="max"),
            },
            group=self.dp_process_group,
            device=self.device,
        )
        self._check(reduced["loss"])
        self._check_gradient(reduced.pop(GRAD_NORM))
        if isinstance(self.optim, SkipStepOptimizer) and not self._num_left_out:
            self.optim.latest_loss = torch.tensor(reduced["loss"], device=self.device)
        for name, value in reduced.items():
            self.trainer.record_metric(name, value)
        self.trainer.record_metric("num_tokens", self.trainer.global_train_tokens_seen)

    def optim_step(self) -> None:
        """Update the weights; not from a gradient that is not finite, after which a skip-step optimizer goes on."""
        if not self._num_left_out:
            super().optim_step()
            self.refresh_copy()
            return
        assert self.optim is not None
        self.trainer.record_metric("total grad norm", self._grad_norm, reduce_type=None, namespace="optim")
        for index, group in enumerate(self.optim.param_groups):
            rate = group["lr"] if self.scheduler is None else self.scheduler.set_lr(group, self.trainer)
            self.trainer.record_metric(f"LR (group {index})", rate, namespace="optim")
        self.record_metric("step skipped", 1.0, namespace="optim")

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of gradients that `train_batch` has clipped already: OLMo-core's `optim_step` asks for it again."""
        return self._grad_norm

    def end_step(self) -> None:
        """Called once after the last update of a step that has several."""

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._broken(f"the loss is {loss}")

    def _check_gradient(self, norm: float) -> None:
        if math.isfinite(norm):
            self._num_left_out = 0
            return
        self._num_left_out += 1
        if not isinstance(self.optim, SkipStepOptimizer) or self._num_left_out > MAX_LEFT_OUT:
            raise self._broken(f"the norm of the gradient is {norm}")
        log.warning("step %d is left out: the norm of its gradient is %s", self.trainer.global_step, norm)

    def _broken(self, what: str) -> RunError:
        return RunError(
            f"{what} at step {self.trainer.global_step}, which was not taken: start again with a lower --learning_rate "
            "in another --output_dir, or look at the data of this step. "
            f"{last_checkpoint(Path(self.trainer.save_folder))}"
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
