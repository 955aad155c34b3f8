"""OLMo-core's train module, given an objective: forward, backward and update over microbatches of packed documents."""

from __future__ import annotations

import logging
import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TransformerTrainModule
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FSDPModule

from open_instruct.checkpoints.resume import last_checkpoint
from open_instruct.errors import RunError
from open_instruct.learner.backend import Metrics, refuse_other_backend
from open_instruct.learner.forward import token_logprobs
from open_instruct.learner.olmo_core.cast_copy import CastCopy
from open_instruct.learner.olmo_core.saved_state import state_of
from open_instruct.learner.reference_policy import Reference
from open_instruct.learner.speed import OwnPace, StepClock
from open_instruct.learner.teacher import Comparison
from open_instruct.models.compiled import FALLBACKS
from open_instruct.models.context_parallel import context_of
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.models.segments import segments_of
from open_instruct.models.shards import reshard
from open_instruct.objectives.objective import REFERENCE_TOKENS, BoundLoss, LossOutputs, TokenLogprobs
from open_instruct.packing.on_device import on_device
from open_instruct.parallel.process import gathered
from open_instruct.parallel.reduce import gather_rows, reduce_metrics
from open_instruct.records import Batch, Metric, PackedBatch, StepBatch

log = logging.getLogger(__name__)

GIB = 1024**3
GRAD_NORM = "grad_norm"
OLD_TOKENS = "old_logprobs_N"
NEGATIVE_BY_ROUNDING = 1e-3
# A skip-step optimizer leaves out a step whose gradient is not finite. More than so many in a row are no outliers.
MAX_LEFT_OUT = 10
MAX_NAMED = 16


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


class ObjectiveTrainModule(TransformerTrainModule):
    """OLMo-core's train module with the loss of an objective instead of next-token prediction; a `Learner`.

    Losses are sums over the microbatch divided by a global count, so their total over microbatches and ranks is the
    loss of the global batch however that was cut.

    :param loss: of the run; every argument not named here is `TransformerTrainModule`'s.
    :param reduces_last: gradients stay whole on each rank, float32, until the last microbatch of an update is done.
    """

    def __init__(self, *, loss: BoundLoss, reduces_last: bool = False, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        # From a GPU they are copied while the training goes on, not when they are listed.
        self.state_dict_save_opts.cpu_offload = False
        self.loss = loss
        self.reduces_last = reduces_last
        # For losses that are penalised for leaving it. Give it before the first step and before a checkpoint is loaded.
        self.reference: Reference | None = None
        # For losses that compare logits with a teacher's.
        self.comparison: Comparison | None = None
        # A frozen model that the policy is drawn to on its own completions; built from its files after a restart.
        self.teacher: Transformer | None = None
        self._has_nothing_to_learn = False
        self._grad_norm = 0.0
        self._num_left_out = 0
        self._copy: CastCopy | None = None
        self._clock = StepClock(self.device)
        self._pace: OwnPace | None = None

    @property
    def train_module(self) -> ObjectiveTrainModule:
        return self

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

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        if optim is False or self.optim is None or not self.optim.state:
            # OLMo-core's own gives the optimizer its first state.
            state = super().state_dict_to_save(optim=optim)
        else:
            state = state_of(self.model, self.optim)
        if self.reference is not None:
            state |= self.reference.state_to_save(self.state_dict_save_opts)
        return state

    def state_dict_to_load(self, metadata: Metadata, *, optim: bool | None = None) -> dict[str, Any]:
        refuse_other_backend(metadata.state_dict_metadata, own="olmo_core")
        state = super().state_dict_to_load(metadata, optim=optim)
        if self.reference is not None:
            state |= self.reference.state_to_load(metadata, self.state_dict_load_opts)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.reference is not None:
            self.reference.load(state_dict, self.state_dict_load_opts)
        self.refresh_copy()

    def _set_model_mode(self, mode: Literal["train", "eval"]) -> None:
        super()._set_model_mode(mode)
        if self._copy is not None:
            self._copy.model.train(mode == "train")

    def microbatch_loss(self, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        """The microbatch's share of the loss of the global batch, with gradient."""
        scores = token_logprobs(
            self.computing_model,
            batch.packed,
            device=self.device,
            temperature=self.loss.temperature_of(batch),
            with_entropy=self.loss.with_entropy,
            with_collisions=self.loss.with_collisions,
            classes=self.loss.class_ids,
            measure=self._measure(batch),
        )
        values = on_device(batch.values, self.device)
        return self.loss.function(scores, replace(batch, values=values), counts)

    def with_frozen_logprobs(self, updates: Sequence[StepBatch], *, num_epochs: int) -> tuple[StepBatch, ...]:
        """The updates of a step with the log-probs that are fixed during it; call it before the first of them.

        The reference policy's, if there is one, and those of the policy as it is now. The latter are left out where the
        step is a single update: there they are those of the update's own forward pass, so a pass is saved, and the
        ratio is exactly 1.
        """
        models = {} if self.reference is None else {REFERENCE_TOKENS: self.reference.model}
        if self.teacher is not None:
            models["teacher_logprobs_N"] = self.teacher
        if len(updates) * num_epochs > 1:
            models[OLD_TOKENS] = self.computing_model
        return self._with_logprobs_of(models, updates)

    @torch.no_grad()
    def _with_logprobs_of(
        self, models: Mapping[str, Transformer], updates: Sequence[StepBatch]
    ) -> tuple[StepBatch, ...]:
        """The updates with the log-probs of each of `models`, by the names of the values that they become."""
        if not models:
            return tuple(updates)
        self._set_model_mode("eval")
        filled = tuple(
            replace(
                update,
                microbatches=tuple(
                    replace(batch, values={**batch.values, **self._frozen(models, batch.packed)})
                    for batch in update.microbatches
                ),
            )
            for update in updates
        )
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        for model in models.values():
            reshard(model)
        return filled

    def _frozen(self, models: Mapping[str, Transformer], packed: PackedBatch) -> dict[str, torch.Tensor]:
        """The reference, and the teacher, may be the policy itself, without its adapters."""
        values = {}
        for name, model in models.items():
            with nullcontext() if name == OLD_TOKENS else adapters_off(model):
                values[name] = self._scores(model, packed).logprobs_N
        return values

    @torch.no_grad()
    def scores(self, batch: Batch) -> TokenLogprobs:
        measure, with_entropy = self._measure(batch), self.loss.with_entropy
        return self._scores(self.computing_model, batch.packed, measure=measure, with_entropy=with_entropy)

    def _scores(
        self, model: Transformer, packed: PackedBatch, *, measure: Measure | None = None, with_entropy: bool = False
    ) -> TokenLogprobs:
        return token_logprobs(
            model,
            packed,
            device=self.device,
            temperature=self.loss.temperature,
            with_entropy=with_entropy,
            classes=self.loss.class_ids,
            measure=measure,
        )

    def _measure(self, batch: Batch) -> Measure | None:
        comparison = self.comparison
        return None if comparison is None else comparison.measure(self.computing_model, batch, device=self.device)

    @torch.no_grad()
    def prepared(self, step: StepBatch) -> StepBatch:
        """The step as its loss is to see it: with the reference's log-probs, and see `BoundLoss.prepare`."""
        if self.reference is not None and REFERENCE_TOKENS not in step.microbatches[0].values:
            (step,) = self.with_frozen_logprobs([step], num_epochs=1)
        if self.loss.prepare is None:
            return step
        self._set_model_mode("eval")
        looked_at = step if self.loss.looks_at is None else self.loss.looks_at(step)
        scores = [self.scores(batch) for batch in looked_at.microbatches]
        if scores:
            reshard(self.model)
        return self.loss.prepare(step, scores, partial(gather_rows, group=self.dp_process_group))

    def pre_train(self) -> None:
        # OLMo-core checks here that batches divide evenly in tokens; ours are planned in documents.
        pass

    def global_num_flops_in_batch(self, batch: dict[str, Any]) -> int | None:
        return None

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """`forward_backward` of `batch["step"]`, for OLMo-core's own trainer."""
        assert not dry_run, "the loader has no mock batch"
        self._record(self.forward_backward(batch["step"]))

    def optim_step(self) -> None:
        """`update`, for OLMo-core's own trainer."""
        self._record(self.update())

    def _record(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.trainer.record_metric(name, value)

    @contextmanager
    def _train_microbatch_context(self, micro_batch_idx: int, num_micro_batches: int) -> Iterator[None]:
        with super()._train_microbatch_context(micro_batch_idx, num_micro_batches):
            if self.reduces_last and isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(micro_batch_idx == num_micro_batches - 1)
            yield

    def forward_backward(self, step: StepBatch) -> dict[str, float]:
        """Forward and backward over this rank's microbatches, then one all-reduce for all metrics."""
        step = self.prepared(step)
        self._has_nothing_to_learn = step.counts["rows"] == 0
        self._set_model_mode("train")
        # FSDP averages gradients over the data-parallel ranks; the denominators are global already. Ranks that split a
        # row are averaged over too, while each has only its tokens' part of the row's gradient.
        context = context_of(self.model)
        gradient_scale = get_world_size(self.dp_process_group) * (1 if context is None else context.degree)
        sums = WeightedSums()
        losses: list[float | torch.Tensor] = []
        for index, microbatch in enumerate(step.microbatches):
            with self._train_microbatch_context(index, len(step.microbatches)):
                with self._clock.timing("forward"):
                    outputs = self.microbatch_loss(microbatch, step.counts)
                with self._clock.timing("backward"):
                    self.backward(outputs.loss * gradient_scale)
            sums.add(outputs.metrics)
            losses.append(outputs.metrics["loss"].value)
            packed = microbatch.packed
            sums.add({"padding_fraction": padding_fraction(packed), "shared_fraction": shared_fraction(packed)})
        self.model.post_batch()

        maxima = {name: Metric(value=value, reduction="max") for name, value in memory_so_far(self.device).items()}
        of_rank = sums.means() | maxima | self.clipped()
        reduced = reduce_metrics(of_rank, group=self.dp_process_group, device=self.device)
        if not math.isfinite(reduced["loss"]):
            raise self._broken(f"the loss is {reduced['loss']}{self._where(step, losses)}")
        self._check(reduced["loss"], step.counts)
        for name in self.loss.never_negative:
            if reduced[name] < -NEGATIVE_BY_ROUNDING:
                raise RunError(f"{name} is {reduced[name]:.6f}, but can never be below 0: {self.loss.remedy}")
        if GRAD_NORM in reduced:
            self._grad_norm = reduced.pop(GRAD_NORM)
            self._check_gradient(self._grad_norm)
        if isinstance(self.optim, SkipStepOptimizer) and not self._num_left_out:
            self.optim.latest_loss = torch.tensor(reduced["loss"])
        return reduced if self.loss.derive is None else self.loss.derive(reduced)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clipped(self) -> dict[str, Metric]:
        """Clip the gradient; its norm, where that is known before the optimizer's step.

        Here and not in `update`: so it is read together with the loss, in one wait for the device.
        """
        assert self.max_grad_norm is not None
        return {GRAD_NORM: Metric(value=self._clip_grad_norm(self.max_grad_norm), reduction="max")}

    def take_step(self) -> None:
        assert self.optim is not None
        self.optim.step()

    def update(self) -> Metrics:
        """Update the weights; not from a gradient that is not finite, after which a skip-step optimizer goes on.

        Nor where there was nothing to learn from, or momentum alone would move them.
        """
        assert self.optim is not None
        if self._has_nothing_to_learn:
            return {GRAD_NORM: 0.0}
        metrics: dict[str, float | torch.Tensor] = {GRAD_NORM: self._grad_norm}
        if self.computing_model.compile_enabled:
            metrics["uncompiled_functions"] = float(FALLBACKS.count)
        for group in reversed(self.optim.param_groups):
            metrics["lr"] = group["lr"] if self.scheduler is None else self.scheduler.set_lr(group, self.trainer)
        if self._num_left_out:
            return metrics | {"step_skipped": 1.0}
        if isinstance(self.optim, SkipStepOptimizer):
            self.optim.latest_grad_norm = torch.tensor(self._grad_norm)
        with self._clock.timing("optimizer"):
            self.take_step()
            self.model.post_optim_step()
            self.refresh_copy()
        if isinstance(self.optim, SkipStepOptimizer):
            metrics["step_skipped"] = self.optim.step_skipped
        return metrics | self._clock.read()

    def own_pace(self) -> float | None:
        if self._pace is None:
            self._pace = OwnPace(self.computing_model.lm_head, self.device)
        return self._pace.read()

    def end_step(self) -> None:
        """Call it once after the last update of a step."""
        if self.reference is not None:
            self.reference.follow(self.model, step=self.trainer.global_step)

    def _where(self, step: StepBatch, losses: Sequence[float | torch.Tensor]) -> str:
        """The rows of the microbatches, on any rank, whose own losses are not finite, in parentheses."""
        broken = [
            batch for batch, loss in zip(step.microbatches, losses, strict=True) if not math.isfinite(float(loss))
        ]
        own = [row for batch in broken for row in batch.row_ids]
        rows = sorted({row for of_rank in gathered(own, self.dp_process_group) for row in of_rank})
        more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
        named = ", ".join(map(str, rows[:MAX_NAMED]))
        noun = "row" if len(rows) == 1 else "rows"
        return f" (in a microbatch with {noun} {named}{more} of the training data, counted from 0)" if rows else ""

    def _check(self, loss: float, counts: Mapping[str, int]) -> None:
        first_loss = self.loss.first_loss
        expected = first_loss(counts) if callable(first_loss) else first_loss
        if self.trainer.global_step != 1 or expected is None:
            return
        # Policy and reference are the same weights before the first update: the cheapest proof that
        # packing, labels and the frozen scores agree.
        computes_in = self.dp_config.param_dtype if self.dp_config else next(self.computing_model.parameters()).dtype
        tolerance = (1e-3 if computes_in in ("float32", torch.float32) else 5e-2) * max(1.0, expected)
        if abs(loss - expected) > tolerance:
            raise RunError(
                f"the first loss is {loss:.6f}, but a policy equal to its reference has {expected:.6f}: "
                f"{self.loss.remedy}"
            )

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


def memory_so_far(device: torch.device) -> dict[str, float]:
    """Most memory this process has held: the device's on CUDA, the host's elsewhere.

    On CUDA also what its allocator had taken for that, and how often it found no more and gave back what it kept first.
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
