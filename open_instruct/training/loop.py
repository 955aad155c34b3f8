"""The one training loop: it takes the steps of every run, whatever batches and backend it has.

OLMo-core's trainer is the record of the run (`trainer.py`); its callbacks are called at the points
at which it would call them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.utils import all_reduce_value
from olmo_core.train.callbacks import Callback
from torch.distributed.checkpoint.stateful import Stateful

from open_instruct.checkpoints.background import in_background
from open_instruct.checkpoints.resume import (
    load_checkpoint,
    remove_old_checkpoints,
    resume,
    save_checkpoint,
)
from open_instruct.config.run_sections import RunSection
from open_instruct.core.errors import RunError
from open_instruct.core.metrics import metric_entry
from open_instruct.core.records import StepBatch
from open_instruct.parallel.process import gather_objects
from open_instruct.parallel.processes import find_cpu_host
from open_instruct.parallel.status import this_process
from open_instruct.run.alarms import WINDOW, find_slowest, find_slowest_loader
from open_instruct.run.cadence import Cadence, record_signals
from open_instruct.run.opening import Run
from open_instruct.training.best_step_watch import BestStepWatch
from open_instruct.training.measure.profile import build_profilers
from open_instruct.training.measure.speed import StepClock, count_step_flops, find_peak_flops
from open_instruct.training.policy import Policy
from open_instruct.training.rows.sample_loader import SampleLoader
from open_instruct.training.scoring import Heldout
from open_instruct.training.trainer import build_checkpointer, build_trainer, list_called

# Takes optimizer updates of a policy, and gives their metrics.
TakeUpdates = Callable[[Policy, Sequence[StepBatch]], dict[str, float]]
# What else learns in a step; it gives its metrics.
LearnBefore = Callable[[TakeUpdates], Mapping[str, float]]
OnStep = Callable[[int, Mapping[str, float]], None]


class Loop:
    """Takes optimisation steps and writes the checkpoints of a run. Every method is collective.

    Args:
        learner: the policy that learns.
        place: the run's place in its data, saved and loaded with every checkpoint.
        run: the run that this process has joined.
        flags: of the run: its checkpoints and how they are written.
        profile_steps: the first and the last step that are profiled; empty: none.
        start_model: fingerprint of the start model, see `fingerprint_start_model`.
        cadence: of the whole run; the schedule stretches over its steps.
        critic: what else learns in a step, and is saved with every checkpoint.
        callbacks: OLMo-core's, by name, beside those of the flags.
    """

    def __init__(
        self,
        learner: Policy,
        place: Stateful,
        *,
        run: Run,
        flags: RunSection,
        profile_steps: Sequence[int] = (),
        start_model: str,
        cadence: Cadence,
        critic: Policy | None = None,
        callbacks: Mapping[str, Callback] | None = None,
    ) -> None:
        self.learner = learner
        self.folder = run.directory.path
        self.cadence = cadence
        self.keep_last_n = flags.keep_last_n_checkpoints
        self.best_step: int | None = None
        self.saves_in_background = flags.async_checkpoints == "on"
        if flags.async_checkpoints == "auto":
            self.saves_in_background = learner.device.type != "cpu"
        chosen_callbacks = build_profilers(
            profile_steps, num_steps=cadence.num_steps, run_folder=self.folder
        )
        chosen_callbacks |= callbacks or {}
        self.trainer = build_trainer(
            learner,
            place,
            folder=self.folder,
            num_steps=cadence.num_steps,
            callbacks=chosen_callbacks,
            critic=critic,
        )
        self.checkpointer = build_checkpointer(self.folder, start_model, learner, critic)
        self.trainer.checkpointer = self.checkpointer
        self._callbacks = list_called(self.trainer, chosen_callbacks)
        # Passing metrics on costs two all-reduces in every step, so it is done only where a
        # callback listens.
        self._has_listeners = bool(chosen_callbacks)
        self._has_begun = False
        self._clock = StepClock(torch.device("cpu"))  # a save takes the host's time
        self._removal = in_background(lambda: None)
        self._peak_flops = find_peak_flops(learner.device)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.trainer.global_step

    def take_step(
        self, updates: Sequence[StepBatch], *, num_tokens: int, before: LearnBefore | None = None
    ) -> dict[str, float]:
        """One optimizer update for each of `updates`, and at last the learner's `end_step`.

        `before`, if any, is called first within the step, with `take_updates`.

        Returns the metrics of the step, the same on every rank: means over the updates, but the
        maximum of each `…/max`; and `time/…`, sums of this rank's seconds. `num_tokens` are the
        tokens of the whole step, on all ranks.
        """
        self._begin()
        self.trainer.global_step += 1
        self.trainer.global_train_tokens_seen += num_tokens
        this_process.begin(f"training step {self.step}")
        self._call("pre_step", {"updates": updates})
        row_before: Mapping[str, float] = {}
        if before is not None:
            row_before = before(self.take_updates)
        row = self.take_updates(self.learner, updates)
        self.learner.end_step()
        this_process.begin(f"finishing step {self.step}")
        self._call("post_train_batch")
        row |= {**row_before, "num_tokens": self.trainer.global_train_tokens_seen}
        row |= {"time/checkpoint": 0.0} | self._clock.read()
        if self.cadence.compares_speed_after(self.step):
            host = find_cpu_host(self.learner.device.type)
            paces = gather_objects((self.learner.seconds_per_token(), host))
            token_s = [seconds for seconds, _ in paces]
            row |= find_slowest("learner", token_s, [host for _, host in paces])
        self._call("post_step")
        if self._has_listeners:
            for name, value in row.items():
                self.trainer.record_metric(name, value)
            self.trainer._log_metrics()  # to the callbacks, as OLMo-core's `fit` does after a step
        self._finish_save(waits=False)
        self._call("pre_load_batch")
        return row

    def take_updates(self, policy: Policy, updates: Sequence[StepBatch]) -> dict[str, float]:
        """One optimizer update of `policy` for each of `updates`; returns their metrics, merged."""
        rows: list[dict[str, float]] = []
        for update in updates:
            policy.backend.zero_grads()
            metrics = dict(policy.forward_backward(update))
            self._call("pre_optim_step")
            with self._clock.timing("checkpoint"):
                self.checkpointer.wait_for_copy()
            metrics |= policy.update()
            rows.append({name: float(value) for name, value in metrics.items()})
        policy.backend.zero_grads()
        return merge_rows(rows)

    def fit(
        self,
        loader: SampleLoader,
        *,
        on_step: OnStep,
        heldout: Heldout | None = None,
        best: BestStepWatch | None = None,
    ) -> int | None:
        """Take all remaining steps, one update each, with a checkpoint where one is due.

        `on_step` is called with the number and the metrics of every step, on every rank; the
        metrics of `heldout` are among them where it is due. A step that is the `best` so far is
        saved too.

        Returns the number of the signal that ended the training early (after a step and its
        checkpoint), or None.
        """
        signal: int | None = None
        began_s = time.perf_counter()
        with record_signals() as received_signal:
            updates = self._updates(loader)
            waits_s = deque[float](maxlen=WINDOW)
            durations_s = deque[float](maxlen=WINDOW)
            while self.step < self.cadence.num_steps and signal is None:
                update = next(updates)
                waited_s = time.perf_counter() - began_s
                row = self.take_step([update], num_tokens=update.counts["tokens"])
                signal = agree_on_signal(received_signal.number)
                is_last = signal is not None or self.cadence.is_last(self.step)
                is_saved = is_last or self.cadence.saves_after(self.step)
                # After a signal nothing is scored, as its sender waits. A run that resumes there
                # scores first of all.
                is_scored = signal is None and self.cadence.evaluates_after(self.step)
                if is_saved or (heldout is not None and is_scored):
                    # The optimizer's time counts as this step's, as no later step will wait for it.
                    self.wait_for_device()
                duration_s = time.perf_counter() - began_s
                waits_s.append(waited_s)
                durations_s.append(duration_s)
                row |= {"time/data": waited_s} | self._speeds(update, duration_s)
                if self.cadence.compares_speed_after(self.step):
                    row |= find_slowest_loader(gather_objects(sum(waits_s) / sum(durations_s)))
                if heldout is not None and is_scored:
                    row |= heldout.metrics(self.step)
                on_step(self.step, row)
                is_best = best is not None and best.improves(self.step, row, is_saved=is_saved)
                if is_saved or is_best:
                    best_step = None if best is None else best.step
                    self.save(waits=is_last, best_step=best_step)
                # Scoring held-out rows and writing a checkpoint do not count as slow training.
                began_s = time.perf_counter()
        self.close()
        return signal

    def save(self, *, waits: bool = True, best_step: int | None = None) -> None:
        """Write a checkpoint of this step, and remove those before the last `keep_last_n`.

        :param waits: whether it is written on return; otherwise it may be written while the next
            steps are taken.
        :param best_step: its checkpoint, which may be this one, is not removed.
        :raises RunError: this checkpoint, or the one begun before, cannot be written; earlier ones
            are unharmed.
        """
        self._finish_save()
        # Not before: until this step's checkpoint is whole, the one before it is needed.
        self.best_step = best_step
        waits = waits or not self.saves_in_background
        with self._clock.timing("checkpoint"):
            save_checkpoint(self.trainer, self.learner.model, waits=waits)
            if waits:
                self._remove_old()

    def _finish_save(self, *, waits: bool = True) -> None:
        with self._clock.timing("checkpoint"):
            if self.checkpointer.finish(waits=waits):
                self._remove_old(waits=waits)

    def _remove_old(self, *, waits: bool = True) -> None:
        self._removal.result()
        lasting_interval = self.cadence.lasting_interval
        if self.keep_last_n or lasting_interval > 1:
            self._removal = remove_old_checkpoints(
                self.folder,
                keep_last_n=self.keep_last_n,
                lasting_interval=lasting_interval,
                best_step=self.best_step,
            )
        if waits:
            self._removal.result()

    def resume(self, *, warn: Callable[[str], None]) -> bool:
        """Load the newest checkpoint that is whole. Returns whether there was one."""
        this_process.begin("loading the checkpoint")
        return resume(self.trainer, warn=warn) is not None

    def rewind_to(self, step: int, *, checkpoint: Path | None) -> None:
        """Make `step` the next one, with the weights and the optimizer of `checkpoint`.

        None: with those that are loaded.

        :raises RunError: the checkpoint cannot be read.
        """
        if checkpoint is not None:
            load_checkpoint(self.trainer, checkpoint)
        self.trainer.global_step = step - 1

    def load_step(self, step: int) -> None:
        """Load the checkpoint of an earlier step, to export it.

        :raises RunError: it is damaged, or has gone; the message says how to go on.
        """
        this_process.begin("loading the best checkpoint")
        try:
            load_checkpoint(self.trainer, self.folder / f"step{step}")
        except RunError as error:
            raise RunError(
                f"{error}. It is the best one, and was to be exported: remove that folder and "
                "give the same command again to export the best of the others, or leave "
                "--keep_best out to export the last"
            ) from error

    def wait_for_copy(self) -> None:
        """Wait until a checkpoint under way no longer reads the weights and the optimizer."""
        self.checkpointer.wait_for_copy()

    def wait_for_device(self) -> None:
        """Wait until the device has done all its work, the optimizer's step last."""
        if self.learner.device.type == "cuda":
            torch.cuda.current_stream(self.learner.device).synchronize()

    def close(self) -> None:
        """End the save under way, and tell the callbacks that the training is over."""
        self._finish_save()
        self._removal.result()
        if self._has_begun:
            self._call("post_train")
        self._call("close")

    def _speeds(self, update: StepBatch, duration_s: float) -> dict[str, float]:
        """Real tokens a second and, for a GPU whose peak is known, the share of its peak FLOP/s."""
        speeds = {"tokens_per_second": update.counts["tokens"] / duration_s}
        if self._peak_flops is not None:
            packed_batches = [microbatch.packed for microbatch in update.microbatches]
            num_documents = max(1, sum(each.num_sequences for each in packed_batches))
            mean_length = max(1, sum(each.num_tokens for each in packed_batches) // num_documents)
            num_flops = count_step_flops(self.learner.model, update.counts, mean_length=mean_length)
            speeds["mfu"] = num_flops / (duration_s * dist.get_world_size() * self._peak_flops)
        return speeds

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.learner.seconds_per_token()
            self._call("pre_train")
            self._call("pre_load_batch")

    def _updates(self, loader: SampleLoader) -> Iterator[StepBatch]:
        self._begin()
        while True:
            self.trainer.epoch = loader.epoch
            self._call("pre_epoch")
            yield from loader.rest_of_epoch()
            self._call("post_epoch")
            loader.begin_next_epoch()

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*arguments)


def agree_on_signal(number: int | None) -> int | None:
    """The signal that any rank got; the same on all, as they must stop after the same step.

    Collective over gloo, so that no rank waits for its GPU.
    """
    return all_reduce_value(number or 0, torch.device("cpu"), op=dist.ReduceOp.MAX) or None


def merge_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several updates in one row, each put together as the table of metrics says."""
    merged_row: dict[str, float] = {}
    for name in rows[0] if rows else ():
        values = [row.get(name, 0.0) for row in rows]
        reduction = metric_entry(name).over_updates
        if reduction == "max":
            merged_row[name] = max(values)
        elif reduction == "sum":
            merged_row[name] = sum(values)
        else:
            merged_row[name] = sum(values) / len(rows)
    return merged_row
