"""The loop of a GRPO run: rollouts, one optimisation step, weights to the engines, and again.

If a learner dies, the loop goes back to the last checkpoint; the pool restarts engines that die.
"""

import time
from collections.abc import Sequence
from typing import Any

from olmo_core.train.callbacks import Callback

from open_instruct.batching.rollouts import RankStep
from open_instruct.cluster.learner_call import LearnerLost
from open_instruct.cluster.learner_group import LearnerMethod, LearnerProcess, P, R
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import RolloutGroup
from open_instruct.parallel.status import this_process
from open_instruct.rewards.judge import JUDGE_COSTS
from open_instruct.rl.agreement import AgreementWatch, build_probe, plan_probe
from open_instruct.rl.checked_run import RolloutRun
from open_instruct.rl.evaluation import evaluate
from open_instruct.rl.fleet import Fleet
from open_instruct.rl.run_checks import CONVERSATIONS
from open_instruct.rl.samples import plan_rank_work
from open_instruct.rl.step_checks import SignalWatch, refuse_failed_verdicts
from open_instruct.rl.traces import Traces
from open_instruct.rl.view import FleetView
from open_instruct.run.alarms import find_slowest
from open_instruct.run.cadence import build_cadence, describe_stop, record_signals
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.training.best_step_watch import BestStepWatch

# The only hook of OLMo-core's callbacks that a driver calls: its learners are other processes.
CALLED_HOOK = "log_metrics"


class Driver:
    """Owns the loop of a run, and nothing that is learned.

    The learners own weights and optimizer; the conductor owns the prompts and their order.
    """

    def __init__(self, run: RolloutRun, fleet: Fleet) -> None:
        config = run.config
        self.run = run
        self.config = config
        self.fleet = fleet
        self.console = run.console
        self.conductor = fleet.new_conductor()
        self.cadence = build_cadence(config)
        self.signal_watch = SignalWatch(
            has_critic=config.rollout.has_critic,
            judges_format=config.reward.apply_r1_style_format_reward,
            response_length=config.data.response_length,
        )
        self.metrics = MetricsLog(run.directory.metrics, run.trackers, run.console.warn)
        self.traces = Traces(
            run.directory.path, save_traces=config.run.save_traces, warn=run.console.warn
        )
        self.view = FleetView(
            run.console, num_steps=config.num_steps, queues=lambda: self.conductor.stats()
        )
        self.step = 0
        self.num_restarts = 0
        self.num_tokens = 0
        self.agreement = AgreementWatch(
            param_dtype=config.model.param_dtype,
            engine_dtype=config.engine_dtype,
            async_steps=config.rollout.async_steps,
        )
        self.best: BestStepWatch | None = None

    def fit(self) -> int:
        """Take every remaining step and export the model. Returns the exit code.

        Raises:
            RunError: something died more often than `--max_restarts`, every verdict of a step
                failed, or engines and learners disagree.
        """
        with (
            record_signals(self._say_signal, second_ends_at_once=True) as self._signal,
            self.view.show(),
        ):
            learner_loss: LearnerLost | None = None
            while True:
                try:
                    if learner_loss is not None:
                        self._restart_learners(learner_loss)
                    return self._run_to_end()
                except LearnerLost as another:
                    learner_loss = another
                finally:
                    self.conductor.close()

    def _run_to_end(self) -> int:
        """Take all steps from the newest checkpoint to the end; returns the exit code."""
        self._resume()
        if self.step == 0 and self.config.evaluation.eval_on_step_0:
            self._evaluate()
        while self.step < self.cadence.num_steps:
            if self._signal.number is not None:
                return self._stop_early(self._signal.number)
            self._take_step()
        self._export()
        return 0

    # One step

    def _take_step(self) -> None:
        began_s = time.monotonic()
        step = self.step + 1
        with self.view.phase("waiting for rollouts"):
            batch = self.conductor.next_batch(step, check=self._check_learners)
        groups = (*batch.groups, *batch.rejected)
        refuse_failed_verdicts(groups)
        rollouts, work = plan_rank_work(
            batch,
            step=step,
            config=self.config,
            conversations=self.run.conversations,
            num_ranks=self.run.layout.data_parallel_world_size,
        )
        for warning in self.signal_watch.after_step(groups, num_samples=len(rollouts.samples)):
            self.console.warn(warning)
        self.traces.add(step, batch, rollouts)
        row = {"step": step, "time/generate": time.monotonic() - began_s}
        row |= self._learn_and_publish(work) | rollouts.metrics
        self._check_agreement(row, groups)
        if self.cadence.evaluates_after(step):
            row |= self._evaluate()
        is_fair = self.fleet.engines_are_alike and not self.fleet.engines_share_cores
        if self.cadence.compares_speed_after(step) and is_fair:
            row |= find_slowest("engine", self.fleet.engines.paces())
        row |= JUDGE_COSTS
        row["time/step"] = time.monotonic() - began_s
        row["tokens_per_second/learners"] = work[0].num_tokens_global / max(row["time/train"], 1e-9)
        row["tokens_per_second/engines"] = row["num_generated_tokens"] / max(row["time/step"], 1e-9)
        self.metrics.write(row)
        self.view.show_step(row, groups[step % len(groups)])
        is_saved = self.cadence.saves_after(step)
        is_best = self.best is not None and self.best.improves(step, row, is_saved=is_saved)
        if is_saved or is_best:
            self._save(waits=self.cadence.is_last(step))
            if not self.cadence.is_last(step):
                self._return_turn()

    def _learn_and_publish(self, work: Sequence[RankStep]) -> dict[str, float]:
        """Take a step and bring its weights to the engines; returns its metrics.

        Args:
            work: of each data-parallel rank.
        """
        publisher = self.fleet.publisher
        with publisher.learners_turn(drain=not self.config.rollout.inflight_updates):
            began_s = time.monotonic()
            with self.view.phase("training"):
                call = self.fleet.learners.start_each(
                    LearnerProcess.step, self._assign_to_learners(work)
                )
                learner_metrics = call.result(self.config.fleet.step_timeout_s)[0]
            train_time_s = time.monotonic() - began_s
            self.step += 1
            with self.view.phase("sending weights"):
                sync_time_s = publisher.publish(self.step)
        self.conductor.weights_published(self.step)
        self.num_tokens += work[0].num_tokens_global
        row = learner_metrics | {
            "num_tokens": self.num_tokens,
            "time/train": train_time_s,
            "time/sync": sync_time_s,
        }
        if self.config.fleet.takes_turns:
            row["time/switch"] = publisher.take_switch_seconds()
        return row

    def _assign_to_learners(self, work: Sequence[RankStep]) -> list[RankStep]:
        """The work of every learner; those of one data-parallel rank do the same."""
        layout = self.run.layout
        return [work[rank // layout.model_parallel_degree] for rank in range(layout.world_size)]

    def _check_agreement(self, row: dict[str, float], groups: Sequence[RolloutGroup]) -> None:
        """Compare the log-probs of engines and learners; a probe adds its metrics to `row`."""
        if self.agreement.needs_probe(self.step, row) and groups:
            row |= self._probe_sync(groups[0].prompt.token_ids)
        warning = self.agreement.check(self.step, row)
        if warning is not None:
            self.console.warn(warning)

    def _probe_sync(self, prompt_token_ids: tuple[int, ...]) -> dict[str, float]:
        """Measure how far apart engines and learners are on tokens sampled after the last sync."""
        config = self.config
        request = build_probe(
            prompt_token_ids,
            step=self.step,
            rollout=config.rollout,
            response_length=config.data.response_length,
            seed=config.optim.seed,
        )
        with self.view.phase("comparing log-probs"):
            answer = self.fleet.engines.submit(request)
            work = plan_probe(
                request,
                answer,
                max_tokens_per_microbatch=config.max_tokens_per_microbatch,
                num_ranks=self.run.layout.data_parallel_world_size,
            )
            with self.fleet.publisher.learners_turn():
                call = self.fleet.learners.start_each(
                    LearnerProcess.compare_with_engine, self._assign_to_learners(work)
                )
                metrics = call.result(self.config.fleet.step_timeout_s)[0]
        self._return_turn()
        return metrics

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the weights that the engines have on the held-out prompts; returns metrics."""
        assert self.run.held_out is not None
        with self.view.phase("evaluating"):
            metrics, samples = evaluate(
                self.run.held_out, self.fleet.new_episodes(), config=self.config
            )
        self.run.directory.write_evaluation({"step": self.step} | metrics | {"samples": samples})
        return metrics

    # Checkpoints, and what goes wrong

    def _save(self, *, waits: bool) -> None:
        state = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "conductor": self.conductor.state_dict(),
        }
        if self.run.conversations is not None:
            state[CONVERSATIONS] = self.run.conversations.fingerprint
        with self.view.phase("saving"):
            best_step = self.best.step if self.best else None
            self._call_learners(LearnerProcess.save_state, state, waits=waits, best_step=best_step)

    def _export(self) -> None:
        best = None
        if self.best is not None:
            best = self.best.best
            if best is None:
                self.console.warn(self.best.no_best_warning)
        with self.view.phase("exporting"):
            self._call_learners(LearnerProcess.save_model, best)
        self.metrics.close()
        of_step = f" of {best}," if best else ""
        for name, folder in self.run.directory.exports.items():
            if folder.exists():
                self.console.say(f"the {name}{of_step} is in {folder}", style="green")

    def _resume(self) -> None:
        """Load the newest checkpoint if there is one, and bring its weights to the engines."""
        with self.view.phase("loading the checkpoint"):
            state, warnings = self._call_learners(LearnerProcess.resume)[0]
        for warning in warnings:
            self.console.warn(warning)
        self.conductor = self.fleet.new_conductor()
        if state is not None:
            self.step = state["step"]
            self.num_tokens = state["num_tokens"]
            self.conductor.load_state_dict(state["conductor"])
            self.console.say(f"resuming after step {self.step} of {self.config.num_steps}")
        else:
            self.step = self.num_tokens = 0
        self.metrics.keep_until(self.step)
        metric = self.config.run.keep_best
        if metric is not None:
            self.best = BestStepWatch(metric, self.run.directory, until=self.step)
        self.view.rewards = [row["reward"] for row in self.metrics.rows()]
        lora = self.config.lora
        engines_have_start = lora.adapter_name_or_path is None and not lora.use_qlora
        if self.step != self.fleet.publisher.version or not engines_have_start:
            with self.view.phase("sending weights"):
                self.fleet.publisher.publish(self.step)
        self.conductor.weights_published(self.step)

    def _restart_learners(self, failure: LearnerLost) -> None:
        self.num_restarts += 1
        if self.num_restarts > self.config.fleet.max_restarts:
            raise RunError(
                f"{failure}. That was the last of --max_restarts {self.config.fleet.max_restarts}; "
                "give the same command again to go on from the last checkpoint"
            ) from failure
        self.console.warn(
            f"{failure}; starting the learners again from the last checkpoint "
            f"({self.num_restarts} of {self.config.fleet.max_restarts})"
        )
        with self.view.phase("restarting learners"):
            self.fleet.restart_learners()

    def _stop_early(self, number: int) -> int:
        if self.step > 0:
            self._save(waits=True)
        message, code = describe_stop(number, step=self.step, folder=self.run.directory.path)
        self.console.say(message)
        return code

    def _say_signal(self, name: str) -> None:
        after = "this step"
        if self.step >= self.cadence.num_steps:
            after = f"{this_process.status}; a second one ends it at once"
        self.console.say(f"{name}: stopping after {after}")

    def _check_learners(self) -> None:
        with self.fleet.publisher.learners_at_work():
            self.fleet.learners.check(self.config.fleet.step_timeout_s)

    def _call_learners(
        self, method: LearnerMethod[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        with self.fleet.publisher.learners_turn():
            call = self.fleet.learners.start(method, *args, **kwargs)
            return call.result(self.config.fleet.step_timeout_s)

    def _return_turn(self) -> None:
        """Give engines their weights again, where they gave them up for a turn of the learners."""
        if self.fleet.publisher.version is None:
            with self.view.phase("sending weights"):
                self.fleet.publisher.publish(self.step)


class Listener:
    """A tracker that hands the metrics of every step to one of OLMo-core's callbacks.

    Args:
        name: the name of the callback, for messages.

    Raises:
        InputError: the callback has hooks that nothing would call.
    """

    def __init__(self, name: str, callback: Callback) -> None:
        hooks = {
            hook
            for hook, default in vars(Callback).items()
            if callable(default) and not hook.startswith("_")
        }
        uncalled = [
            hook
            for hook in hooks - {CALLED_HOOK}
            if getattr(type(callback), hook) is not getattr(Callback, hook)
        ]
        if uncalled:
            raise InputError(
                f"callbacks: {name} has {', '.join(sorted(uncalled))}, which nothing would call: "
                "the learners of a GRPO run are processes of their own; here "
                f"{CALLED_HOOK} alone is called, after every step",
                kind="own_code",
                flag="callbacks",
            )
        self._callback = callback

    def log(self, row: dict[str, Any], step: int) -> None:
        metrics = {name: value for name, value in row.items() if name != "step"}
        self._callback.log_metrics(step, metrics)

    def finish(self) -> None:
        """Do nothing; other trackers have a file or a connection to close."""
