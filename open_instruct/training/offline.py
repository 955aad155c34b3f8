"""The walk of an offline run whose flags are known to be good: build, score what is frozen, fit,
export.

Legend: N held-out rows, D documents of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from olmo_core.train.callbacks import Callback

from open_instruct.batching.balance import best_fit
from open_instruct.batching.steps import BatchShape
from open_instruct.checkpoints.saved_place import read_saved_place
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError
from open_instruct.core.metrics import HELD_OUT_PREFIX, metric_entry
from open_instruct.core.text import counted, one_of
from open_instruct.data.files.array_file import find_cache_folder
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.objectives.objective import Evaluation, Objective
from open_instruct.parallel.process import on_main_process
from open_instruct.run.cadence import Cadence, stopped_by
from open_instruct.run.metrics_log import logging_steps
from open_instruct.run.opened import Run, open_run, planned_run
from open_instruct.run.pretrained import Pretrained, fingerprint_start_model, open_pretrained
from open_instruct.run.untrained_rows import find_untrained_rows, learned_token_ids
from open_instruct.training.best_step_watch import BestStepWatch, find_idle_watch
from open_instruct.training.export import export_policy
from open_instruct.training.loop import Loop
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Comparison
from open_instruct.training.rows.datasets import load_datasets
from open_instruct.training.rows.sample_loader import SampleLoader, check_place_of_samples
from open_instruct.training.scoring import (
    Heldout,
    Scorer,
    compare_with,
    open_reference_cache,
    reference_logprobs,
)


def train(
    config: TrainingConfig, *, objective: Objective, callbacks: Mapping[str, Callback] | None = None
) -> int:
    """The whole run, as every rank walks it;

    `callbacks` are OLMo-core's, by name. Returns the exit code.
    """
    if config.data.has_held_out_rows and not objective.scores_heldout_rows:
        flag = "--eval_mixer_list" if config.data.eval_mixer_list else "--eval_split"
        raise InputError(
            f"{flag}: {objective.name} has no `evaluate`; write one, or leave the flag out",
            kind="own_code",
        )
    with open_run(config, objective.name) as run:
        pretrained = open_pretrained(
            config, run.directory.hf_model, layout=run.layout, head=objective.choose_head(config)
        )
        more_config = dict(
            objective.export_fields(config, pretrained.tokenizer, pretrained.hf_config)
        )
        if config.data.cache_dataset_only:
            load_datasets(objective, config, pretrained.tokenizer, run.console)
            return 0
        config = planned_run(config, run, pretrained.folder)
        learning = _Learning(config, objective, pretrained, run)
        reference_logps_ND, heldout = learning.score_frozen()
        if objective.only_scores(config):
            return 0
        loader = learning.loader(reference_logps_ND)
        loop = learning.loop(loader, callbacks)
        if heldout is not None and (loop.step == 0 or learning.cadence.evaluates_after(loop.step)):
            learning.check_metric(heldout.evaluate(loop.step))
        best = learning.best_step_watch(until=loop.step)
        with logging_steps(
            run, config, first_step=loop.step, num_steps=learning.num_steps
        ) as on_step:
            signal = loop.fit(loader, on_step=on_step, heldout=heldout, best=best)
        if signal is not None:
            message, code = stopped_by(signal, step=loop.step, folder=run.directory.path)
            run.console.say(message)
            return code
        if heldout is not None:
            more_config |= heldout.evaluate(loop.step).exported
        if best is not None:
            more_config |= learning.load_best(loop, best, heldout)
        export_policy(
            learning.policy,
            pretrained,
            run=run,
            config=config,
            trained_by=objective.name,
            best=best.best if best else None,
            more_config=more_config,
        )
        return 0


def take_first_loss(config: TrainingConfig, *, objective: Objective) -> float:
    """The loss of the first microbatch under the start model, from a run that is given up there.
    Collective.

    What the run writes is in the folder of `config`, which the caller takes away.
    """
    with open_run(config, objective.name) as run:
        pretrained = open_pretrained(
            config, run.directory.hf_model, layout=run.layout, head=objective.choose_head(config)
        )
        objective.export_fields(config, pretrained.tokenizer, pretrained.hf_config)
        learning = _Learning(config, objective, pretrained, run)
        reference_logps_ND, _ = learning.score_frozen()
        policy = learning.policy
        step = policy.prepared(next(learning.loader(reference_logps_ND).rest_of_epoch()))
        policy.backend.set_mode("eval")
        loss = policy.microbatch_loss(step.microbatches[0], step.counts).loss
        return float(loss)


class _Learning:
    """The policy with the start model's weights, and the rows as its steps will take them.

    Methods are collective.
    """

    def __init__(
        self, config: TrainingConfig, objective: Objective, pretrained: Pretrained, run: Run
    ) -> None:
        self.config = config
        self.objective = objective
        self.pretrained = pretrained
        self.run = run
        loss = objective.bind(config).with_ids(pretrained.tokenizer)
        if pretrained.adapter is not None:
            loss = replace(
                loss, checks_first_loss=False
            )  # the reference is the model without the adapter
        self.start_model = fingerprint_start_model(pretrained, run)
        if (teacher := objective.teacher(config)) is not None:
            opened = Comparison.of(teacher, pretrained, config=config, layout=run.layout)
        self.rows, self.heldout_rows = load_datasets(
            objective, config, pretrained.tokenizer, run.console
        )
        self.shape = BatchShape(
            documents_per_sample=objective.choose_rows(config).documents_per_row,
            max_samples_per_microbatch=config.optim.per_device_train_batch_size,
            max_microbatches=config.optim.gradient_accumulation_steps,
            max_seq_length=config.data.max_seq_length,
            packing=config.data.packing,
            pad_to_multiple_of=run.layout.model_parallel_degree,
            prefix_sharing=objective.prefix_sharing(config) if config.data.packing else "off",
        )
        on_main_process(self._refuse_other_rows)
        # Each the rows of one.
        self.samples: Sequence[Sequence[int]] = [(row,) for row in range(len(self.rows))]
        if objective.fills_packs(config):
            self.samples = best_fit(
                range(len(self.rows)), self.rows.num_tokens.tolist(), self.shape.max_seq_length
            )
        steps_per_epoch = self.shape.num_steps_per_epoch(len(self.samples), layout=run.layout)
        # Where that is more steps than the epochs have, the data is gone through again.
        self.num_steps = config.optim.max_train_steps or config.optim.num_epochs * steps_per_epoch
        self.cadence = Cadence(
            num_steps=self.num_steps,
            save_every=config.run.checkpointing_steps or steps_per_epoch,
            save_ephemeral_every=config.run.ephemeral_save_interval,
            evaluate_every=config.data.eval_steps or None,
            saves_best=config.run.keep_best is not None,
        )
        num_rows_per_step = self.shape.max_samples_per_rank * run.layout.data_parallel_world_size
        for warning in (
            *pretrained.warnings,
            *objective.check_rows(self.rows, num_rows_per_step, config),
        ):
            run.console.warn(warning)
        if config.adapters is not None and (
            untrained := find_untrained_rows(pretrained, learned_token_ids(self.rows))
        ):
            run.console.warn(untrained)
        built = config.backend.build(pretrained, run=run, config=config, num_steps=self.num_steps)
        self.policy = Policy(built, loss, balance_scope=config.model.router_balance)
        self.scorer = Scorer(policy=self.policy, shape=self.shape, run=run, config=config)
        if teacher is not None:
            self.policy.comparison, self.rows, self.heldout_rows = compare_with(
                opened, self.rows, self.heldout_rows, student=pretrained, scorer=self.scorer
            )
        moves = objective.reference_moves(config)
        self.reference_moves = moves if moves.get("update_freq") else {}

    def _refuse_other_rows(self) -> None:
        """:raises InputError: the run's newest checkpoint was written with other rows; no model is
        loaded yet.
        """
        if (saved := read_saved_place(self.run.directory.path)) is not None:
            check_place_of_samples(
                saved,
                self.rows,
                seed=self.config.optim.seed,
                shape=self.shape,
                num_ranks=self.run.layout.data_parallel_world_size,
            )

    def score_frozen(self) -> tuple[np.ndarray | None, Heldout | None]:
        """The reference's log-probs of the rows, (N, D), and the held-out rows with theirs.

        They come from the cache, or of the policy before it moves. There are none for an objective
        without a reference.
        """
        reference_logps_ND = None
        heldout = None
        if self.heldout_rows is not None:
            heldout = Heldout(self.heldout_rows, None, self.scorer, self.objective)
        if not self.objective.needs_reference(self.config):
            return reference_logps_ND, heldout
        folder = find_cache_folder(self.config.data.cache_dir) / "reference_logprobs"
        if self.policy.loss.ld_alpha is not None:
            folder /= f"ld-{self.policy.loss.ld_alpha}"
        cache = open_reference_cache(
            folder, self.pretrained, precision=self.config.frozen_as, shape=self.shape
        )
        with adapters_off(self.policy.model):
            if not self.reference_moves:
                title = "reference log-probs"
                reference_logps_ND = reference_logprobs(
                    self.scorer, self.rows, cache=cache, title=title
                )
            if heldout is not None:
                title = "held-out reference log-probs"
                heldout.reference_ND = reference_logprobs(
                    self.scorer, heldout.dataset, cache=cache, title=title
                )
        if self.objective.only_scores(self.config):
            self.run.console.say(
                f"reference log-probs of {counted(len(cache), 'row')}: {cache.path}"
            )
        return reference_logps_ND, heldout

    def check_metric(self, evaluation: Evaluation) -> None:
        """:raises InputError: `--keep_best` names a number of held-out rows that this evaluation
        has not.
        """
        metric = self.config.run.keep_best or ""
        if metric.startswith(HELD_OUT_PREFIX) and metric not in evaluation.row:
            known = [name for name in evaluation.row if metric_entry(name).better is not None]
            remedy = f"give {one_of(known)}" if known else "give a metric of training, such as loss"
            raise InputError(
                f"--keep_best {metric}: an evaluation of this run has no such number; {remedy}",
                kind="bad_value",
                flag="keep_best",
            )

    def best_step_watch(self, *, until: int) -> BestStepWatch | None:
        """What follows the best step under `--keep_best`; None without it."""
        metric = self.config.run.keep_best
        if metric is None:
            return None
        if warning := find_idle_watch(metric, self.cadence, flag="--eval_steps"):
            self.run.console.warn(warning)
        return BestStepWatch(metric, self.run.directory, until=until)

    def load_best(
        self, loop: Loop, watch: BestStepWatch, heldout: Heldout | None
    ) -> Mapping[str, Any]:
        """Give the model the weights of the best step, and return what its held-out scores add to
        its config.json.
        """
        best = watch.best
        if best is None:
            self.run.console.warn(watch.nothing_found)
        elif best.step != loop.step:
            loop.go_back_to(best.step)
            return heldout.score_again(best.step).exported if heldout else {}
        return {}

    def loader(self, reference_logps_ND: np.ndarray | None) -> SampleLoader:
        return SampleLoader(
            self.rows,
            self.samples,
            reference_logps_ND=reference_logps_ND,
            values_class=self.policy.loss.values_class,
            shape=self.shape,
            seed=self.config.optim.seed,
            dp_group=self.policy.dp_process_group,
        )

    def loop(self, loader: SampleLoader, callbacks: Mapping[str, Callback] | None) -> Loop:
        """The loop, which stands where the newest checkpoint stands."""
        run = self.run
        if moves := self.reference_moves:
            backend = self.policy.backend
            backend.reference = backend.moving_reference(
                self.pretrained, run=run, config=self.config, **moves
            )
        loop = Loop(
            self.policy,
            loader,
            run=run,
            config=self.config,
            start_model=self.start_model,
            cadence=self.cadence,
            callbacks=callbacks,
        )
        if loop.resume(warn=run.console.warn):
            run.console.say(f"resuming after step {loop.step} of {self.num_steps}")
        return loop
