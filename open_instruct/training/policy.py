"""One rank's part of a policy: its forward passes, losses, checks and metrics.

A policy is given an objective's loss and owns a `Backend`: it knows no algorithm and no sharding
library.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.train import Trainer

from open_instruct.batching.documents import move_to_device
from open_instruct.checkpoints.resume import last_checkpoint
from open_instruct.config.sections import BalanceScope
from open_instruct.core.batch_values import LogprobsField
from open_instruct.core.errors import RunError
from open_instruct.core.records import Batch, Metric, StepBatch
from open_instruct.models.compiled import FALLBACKS
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.lora.adapters import disable_adapters
from open_instruct.models.shards import reshard
from open_instruct.models.storages import list_module_tensors
from open_instruct.objectives.objective import BoundLoss, LossOutputs, TokenLogprobs
from open_instruct.parallel.process import gather_objects
from open_instruct.parallel.reduce import combine_microbatches, gather_rows, reduce_metrics
from open_instruct.training.backend import GRAD_NORM, Backend, Metrics
from open_instruct.training.measure.speed import (
    ComputeTimer,
    StepClock,
    measure_peak_memory,
    token_fractions,
)
from open_instruct.training.model.forward import token_logprobs
from open_instruct.training.model.routing import (
    StepRouting,
    balance,
    check_balance_scope,
    record_routing,
)
from open_instruct.training.reference import Reference
from open_instruct.training.teacher import TeacherComparison

log = logging.getLogger(__name__)

NEGATIVE_BY_ROUNDING = 1e-3
# A backend may leave out a step with a gradient that is not finite. More than this many in a row
# end the run.
MAX_LEFT_OUT = 10
MAX_NAMED = 16


class Policy:
    """One rank of a policy. Every method is collective: all ranks call it together.

    A step of several updates is: `add_frozen_logprobs` for all of them, then for each of them
    `zero_grads` of the backend, `forward_backward`, `update`; at last `end_step`.

    Losses are sums over the microbatch divided by a global count, so their total over microbatches
    and ranks is the loss of the global batch, however the batch was cut.

    Args:
        backend: holds the weights and steps them.
        loss: the objective's, bound to the flags of the run.
        balance_scope: what the balance loss of routers takes its shares of.
        reference: of losses with a penalty for leaving it.
        teacher: a frozen model that the policy is drawn to on its own completions.
        comparison: of losses that compare logits with a teacher's.
        rate_flag: of the learning rate, for messages.

    Raises:
        InputError: `balance_scope` is "step", and the model has no such loss.
    """

    def __init__(
        self,
        backend: Backend,
        loss: BoundLoss,
        *,
        balance_scope: BalanceScope = "microbatch",
        reference: Reference | None = None,
        teacher: Transformer | None = None,
        comparison: TeacherComparison | None = None,
        rate_flag: str = "--learning_rate",
    ) -> None:
        check_balance_scope(backend.model, balance_scope)
        self.backend = backend
        self.loss = loss
        self._balance_scope = balance_scope
        # The trained model: this rank's shards, in the parameters' own dtype.
        self.model = backend.model
        self.computing_model = backend.computing_model  # the model to call
        self.device = backend.device
        # This rank, and the ranks that see other rows.
        self.dp_process_group = backend.dp_process_group
        self.reference = reference
        self.teacher = teacher
        self.comparison = comparison
        self.rate_flag = rate_flag
        self._has_nothing_to_learn = False
        self._loss = 0.0
        self._grad_norm = 0.0
        self._num_left_out = 0
        self._clock = StepClock(self.device)
        self._compute_timer: ComputeTimer | None = None

    @property
    def trainer(self) -> Trainer:
        """OLMo-core's, as the record of the run: its step, its folder, its checkpoints."""
        return self.backend.train_module.trainer

    def microbatch_loss(self, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        """The microbatch's share of the loss of the global batch, with gradient."""
        scores = self.score(batch, with_collisions=self.loss.with_collisions)
        values = move_to_device(batch.values, self.device)
        return self.loss.compute(scores, replace(batch, values=values), counts)

    def add_frozen_logprobs(
        self, updates: Sequence[StepBatch], *, num_epochs: int
    ) -> tuple[StepBatch, ...]:
        """The updates of a step with the log-probs that are fixed during it; call it before them.

        They are the log-probs of the reference policy, if there is one, and of the policy before
        the step. A step of a single update needs no pass for the latter: its own forward pass gives
        them, and the ratio is exactly 1.
        """
        models: dict[LogprobsField, Transformer] = {}
        if self.teacher is not None:
            models["teacher_logprobs_N"] = self.teacher
        if len(updates) * num_epochs > 1:
            models["old_logprobs_N"] = self.computing_model
        updates = self.add_logprobs(models, updates)
        if self.reference is None:
            return updates
        with self.reference.activated():
            return self.add_logprobs({"reference_logprobs_N": self.reference.model}, updates)

    @torch.no_grad()
    def add_logprobs(
        self, models: Mapping[LogprobsField, Transformer], updates: Sequence[StepBatch]
    ) -> tuple[StepBatch, ...]:
        """The updates with the log-probs of each of `models` among their values."""
        if not models:
            return tuple(updates)
        self.backend.set_mode("eval")

        def add_to_batch(batch: Batch) -> Batch:
            values = batch.values
            for field, model in models.items():
                packed = batch.packed
                context: AbstractContextManager[None] = nullcontext()
                if field != "old_logprobs_N":
                    # A reference or a teacher may be the policy itself without its adapters. It is
                    # what it is with experts of its own choice, whichever the policy's engine
                    # chose.
                    packed = replace(packed, routes_TR=None)
                    context = disable_adapters(model)
                with context:
                    token_scores = token_logprobs(
                        model, packed, device=self.device, temperature=self.loss.temperature
                    )
                values = values.with_logprobs(field, token_scores.logprobs_N)
            return replace(batch, values=values)

        scored_updates: list[StepBatch] = []
        for update in updates:
            microbatches = tuple(map(add_to_batch, update.microbatches))
            scored_updates.append(replace(update, microbatches=microbatches))
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        for model in models.values():
            reshard(model)
        return tuple(scored_updates)

    def score(self, batch: Batch, *, with_collisions: bool = False) -> TokenLogprobs:
        """Log-probs of the labelled tokens under the policy, and what else the loss asks for.

        Without gradient, call `reshard` after the last of several calls.
        """
        model = self.computing_model
        measure: Measure | None = None
        if self.comparison is not None:
            measure = self.comparison.measure(model, batch, device=self.device)
        return token_logprobs(
            model,
            batch.packed,
            device=self.device,
            temperature=self.loss.find_temperatures(batch),
            with_entropy=self.loss.with_entropy,
            with_collisions=with_collisions,
            measure=measure,
            word_ids=self.loss.word_ids,
        )

    @torch.no_grad()
    def prepare_step(self, step: StepBatch) -> StepBatch:
        """The step with the reference's log-probs, after `BoundLoss.prepare`."""
        if self.reference is not None and step.microbatches[0].values.reference_logprobs_N is None:
            (step,) = self.add_frozen_logprobs([step], num_epochs=1)
        scores: list[TokenLogprobs] = []
        if self.loss.scores_before_step:
            self.backend.set_mode("eval")
            microbatches = self.loss.select_scored(step).microbatches
            scores = [self.score(batch) for batch in microbatches]
            reshard(self.model)
        return self.loss.prepare(step, scores, partial(gather_rows, group=self.dp_process_group))

    def forward_backward(self, step: StepBatch) -> Metrics:
        """Compute the gradient of this rank's microbatches, reduced over ranks and clipped.

        One all-reduce follows for all metrics. Returns `loss` and the other metrics of the update.

        :raises RunError: the loss or the gradient is not finite, or the first loss is not the
            expected one.
        """
        step = self.prepare_step(step)
        self._has_nothing_to_learn = step.counts["rows"] == 0
        step_routing = self._count_routing(step)
        self.backend.set_mode("train")
        microbatch_metrics: list[Mapping[str, Metric]] = []
        losses: list[float | torch.Tensor] = []
        num_ranks = 1
        if dist.is_initialized():
            num_ranks = dist.get_world_size(self.dp_process_group)
        share = 1 / (len(step.microbatches) * num_ranks)
        for index, microbatch in enumerate(step.microbatches):
            with self.backend.microbatch(index, len(step.microbatches)):
                with self._clock.timing("forward"), record_routing(self.computing_model) as routers:
                    outputs = self.microbatch_loss(microbatch, step.counts)
                balance_loss, router_metrics = balance(
                    self.model, routers, microbatch.packed, share=share, step_routing=step_routing
                )
                with self._clock.timing("backward"):
                    self.backend.backward(outputs.loss + balance_loss)
            losses.append(outputs.metrics["loss"].value)
            microbatch_metrics += [
                outputs.metrics,
                router_metrics,
                token_fractions(microbatch.packed),
            ]
        self.model.post_batch()

        metrics = combine_microbatches(microbatch_metrics)
        for name, value in measure_peak_memory(self.device).items():
            metrics[name] = Metric(value=value, reduction="max")
        # Clipping here and not in `update` reads the norm together with the loss, in one wait for
        # the device.
        norm = self.backend.clip()
        if norm is not None:
            metrics[GRAD_NORM] = Metric(value=norm, reduction="max")
        reduced_metrics = reduce_metrics(metrics, group=self.dp_process_group, device=self.device)
        if not math.isfinite(reduced_metrics["loss"]):
            rows = self._name_broken_rows(step, losses)
            raise self._build_step_error(f"the loss is {reduced_metrics['loss']}{rows}")
        self._check_first_loss(reduced_metrics["loss"], step.counts)
        for name in self.loss.never_negative:
            if reduced_metrics[name] < -NEGATIVE_BY_ROUNDING:
                raise RunError(
                    f"{name} is {reduced_metrics[name]:.6f}, but can never be below 0: "
                    f"{self.loss.remedy}"
                )
        if GRAD_NORM in reduced_metrics:
            self._grad_norm = reduced_metrics.pop(GRAD_NORM)
            self._check_gradient(self._grad_norm)
        self._loss = reduced_metrics["loss"]
        return self.loss.derive_metrics(reduced_metrics)

    def _count_routing(self, step: StepBatch) -> StepRouting | None:
        """The tokens of each expert in the step, where the balance loss is the step's.

        If the step is cut into microbatches, that takes a pass more.
        """
        if self._balance_scope != "step":
            return None
        routing = StepRouting(self.dp_process_group)
        batches = [batch.packed for batch in step.microbatches]
        if len(batches) > 1:
            self.backend.set_mode("eval")
            run_forward = partial(
                token_logprobs,
                self.computing_model,
                device=self.device,
                temperature=self.loss.temperature,
            )
            routing.count_microbatches(self.computing_model, batches, run_forward)
            reshard(self.model)
        return routing

    def update(self) -> Metrics:
        """Take the optimizer's step; returns `grad_norm`, `lr`, and maybe `step_skipped`.

        No step is taken from a gradient that is not finite, nor from an update without rows to
        learn from, since momentum alone would move the weights.

        :raises RunError: the backend found during its step that the gradient is not finite.
        """
        if self._has_nothing_to_learn:
            self.backend.leave_out_step()
            return {GRAD_NORM: 0.0}
        metrics: dict[str, float | torch.Tensor] = {GRAD_NORM: self._grad_norm}
        if self.computing_model.compile_enabled:
            metrics["uncompiled_functions"] = float(FALLBACKS.count)
        metrics["lr"] = self.backend.set_learning_rate()
        if self._num_left_out:
            self.backend.leave_out_step()
            return metrics | {"step_skipped": 1.0}
        with self._clock.timing("optimizer"):
            optimizer_metrics = self.backend.step(loss=self._loss, grad_norm=self._grad_norm)
        if GRAD_NORM in optimizer_metrics:
            self._check_gradient(float(optimizer_metrics[GRAD_NORM]))
        return {
            **metrics,
            **optimizer_metrics,
            **self._clock.read(),
        }

    def seconds_per_token(self) -> float | None:
        """Seconds of this rank's own computation for a token since the last call.

        The first call begins to measure.
        """
        if self._compute_timer is None:
            self._compute_timer = ComputeTimer(self.computing_model.lm_head, self.device)
        return self._compute_timer.read()

    def list_resident_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that stays on the device between steps, of the frozen models too."""
        yield from self.backend.list_resident_tensors()
        if self.reference is not None:
            yield from self.reference.list_resident_tensors()
        if self.teacher is not None:
            yield from list_module_tensors(self.teacher)

    def end_step(self) -> None:
        """Call it once after the last update of a step."""
        if self.reference is not None:
            self.reference.follow(self.model, step=self.trainer.global_step)

    def _name_broken_rows(self, step: StepBatch, losses: Sequence[float | torch.Tensor]) -> str:
        """The rows, in parentheses, of the microbatches of all ranks whose loss is not finite."""
        rows_here: list[int] = []
        for batch, loss in zip(step.microbatches, losses, strict=True):
            if not math.isfinite(float(loss)):
                rows_here += batch.row_ids
        rows = sorted(set(chain.from_iterable(gather_objects(rows_here, self.dp_process_group))))
        if not rows:
            return ""
        noun = "row" if len(rows) == 1 else "rows"
        names = ", ".join(map(str, rows[:MAX_NAMED]))
        if len(rows) > MAX_NAMED:
            names += f" and {len(rows) - MAX_NAMED} more"
        return f" (in a microbatch with {noun} {names} of the training data, counted from 0)"

    def _check_first_loss(self, loss: float, counts: Mapping[str, int]) -> None:
        if self.trainer.global_step != 1 or not self.loss.checks_first_loss:
            return
        expected = self.loss.first_loss(counts)
        if expected is None:
            return
        # Policy and reference have the same weights before the first update, so the expected loss
        # is the cheapest proof that packing, labels and the frozen scores agree. Those are never in
        # float8, whose rounding adds up.
        if self.backend.compute_dtype == torch.float32:
            tolerance = 1e-3
        elif self.computing_model.fp8_enabled:
            tolerance = 0.25
        else:
            tolerance = 5e-2
        if abs(loss - expected) > tolerance * max(1.0, expected):
            raise RunError(
                f"the first loss is {loss:.6f}, but a policy equal to its reference has "
                f"{expected:.6f}: {self.loss.remedy}"
            )

    def _check_gradient(self, norm: float) -> None:
        if math.isfinite(norm):
            self._num_left_out = 0
            return
        self._num_left_out += 1
        if not self.backend.leaves_out_outliers or self._num_left_out > MAX_LEFT_OUT:
            raise self._build_step_error(f"the norm of the gradient is {norm}")
        log.warning(
            "step %d is left out: the norm of its gradient is %s", self.trainer.global_step, norm
        )

    def _build_step_error(self, what: str) -> RunError:
        return RunError(
            f"{what} at step {self.trainer.global_step}, which was not taken: start again with a "
            f"lower {self.rate_flag} in another --output_dir, or look at the data of this step. "
            f"{last_checkpoint(Path(self.trainer.save_folder))}"
        )
