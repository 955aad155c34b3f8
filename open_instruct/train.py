"""The walk of every offline objective: parse, build, score what is frozen, fit, export.

`dpo.py`, `sft.py` and the other entries are this file with an objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from open_instruct.config.training import TrainingConfig
from open_instruct.entry import run_entry
from open_instruct.objectives.objective import REFERENCE, Objective


def run_objective(objective: Objective, argv: Sequence[str] | None = None) -> int:
    """Train `objective` with the flags in `argv` (default: the command line) and return the exit code."""
    return run_entry(
        objective.config_class,
        partial(train, objective=objective),
        argv,
        program=objective.program,
        validate=objective.validate,
    )


def train(config: TrainingConfig, *, objective: Objective) -> int:
    """The whole run, as every rank walks it. Returns the exit code."""
    # torch, and all that hangs on it, loads only once the flags are known to be good.
    from open_instruct.data.cache import cache_root
    from open_instruct.learner.export import export_policy
    from open_instruct.learner.heldout import Heldout
    from open_instruct.learner.loop import Loop
    from open_instruct.learner.olmo_core.policy import build_policy
    from open_instruct.learner.reference_cache import open_reference_cache, reference_logprobs
    from open_instruct.learner.sample_loader import SampleLoader
    from open_instruct.learner.scoring import Scorer
    from open_instruct.learner.teacher import compare_with, open_teacher
    from open_instruct.packing.steps import BatchShape
    from open_instruct.parallel.wording import counted
    from open_instruct.run.datasets import load_datasets
    from open_instruct.run.opened import open_run
    from open_instruct.run.plan_check import check_plan_of_run
    from open_instruct.run.pretrained import open_pretrained
    from open_instruct.run.signals import stopped_by
    from open_instruct.run.start_model import start_model_of
    from open_instruct.run.trackers import logging_steps

    with open_run(config) as run:
        pretrained = open_pretrained(
            config.model,
            max_seq_length=config.data.max_seq_length,
            export_folder=run.directory.hf_model,
            layout=run.layout,
        )
        check_plan_of_run(config, run, pretrained.folder)
        start_model = start_model_of(pretrained, run)
        teacher = open_teacher(objective.teacher(config), pretrained, run=run, config=config)
        rows, heldout_rows = load_datasets(
            objective.rows, config.data, pretrained=pretrained, seed=config.optim.seed, console=run.console
        )
        shape = BatchShape.of(
            config.optim,
            config.data,
            run.layout,
            documents_per_sample=objective.rows.documents_per_row,
            pad_token_id=pretrained.pad_token_id,
            prefix_sharing=objective.prefix_sharing(config),
        )
        num_steps = shape.num_steps(len(rows), optim=config.optim, layout=run.layout)

        policy = build_policy(pretrained, run=run, config=config, num_steps=num_steps, loss=objective.bind(config))
        scorer = Scorer(policy, shape=shape, console=run.console)

        if teacher is not None:
            policy.comparison, rows, heldout_rows = compare_with(
                teacher, rows, heldout_rows, scorer=scorer, run=run, config=config
            )
        scores = {}
        heldout_reference_ND = None
        if objective.needs_reference(config):
            cache = open_reference_cache(cache_root(config.data.cache_dir), pretrained, model=config.model, shape=shape)
            scores[REFERENCE] = reference_logprobs(scorer, rows, cache=cache, title="reference log-probs")
            if heldout_rows is not None:
                heldout_reference_ND = reference_logprobs(
                    scorer, heldout_rows, cache=cache, title="held-out reference log-probs"
                )
            if objective.only_scores(config):
                run.console.say(f"reference log-probs of {counted(len(cache), 'row')}: {cache.path}")
                return 0

        heldout = None
        if heldout_rows is not None:
            heldout = Heldout(heldout_rows, objective, reference_ND=heldout_reference_ND, config=config, run=run)
            heldout.evaluate(scorer, step=0)

        loader = SampleLoader(
            rows,
            scores=scores,
            shape=shape,
            seed=config.optim.seed,
            dp_group=policy.dp_process_group,
        )
        loop = Loop(
            policy,
            loader,
            folder=run.directory.path,
            start_model=start_model,
            num_steps=num_steps,
            max_tokens_per_step=loader.max_tokens_per_step,
            keep_last_n=config.run.keep_last_n_checkpoints,
        )
        if loop.resume(warn=run.console.warn):
            run.console.say(f"resuming after step {loop.step} of {num_steps}")
        with logging_steps(run, config, first_step=loop.step, num_steps=num_steps) as on_step:
            signal = loop.fit(loader, on_step=on_step, save_interval=config.run.checkpointing_steps)
        if signal is not None:
            told, code = stopped_by(signal, step=loop.step, folder=run.directory.path)
            run.console.say(told)
            return code

        if heldout is not None:
            heldout.evaluate(scorer, step=loop.step)
        export_policy(policy, pretrained, run=run, config=config)
        return 0
