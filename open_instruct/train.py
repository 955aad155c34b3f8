"""The walk of every offline objective: parse, build, score what is frozen, fit, export.

`dpo.py`, `sft.py` and the other entries are this file with an objective; with one of your own it is

    open-instruct train --objective mine.py:MINE --num_processes 2 --output_dir OUT ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.backends import backend_named
from open_instruct.config.help import asks_for_help
from open_instruct.config.training import TrainingConfig
from open_instruct.entry import leave, run_entry, run_to_exit_code, typed
from open_instruct.errors import InputError
from open_instruct.objectives.objective import REFERENCE, Objective
from open_instruct.objectives.registry import OBJECTIVES
from open_instruct.run.first_look import look_at, look_at_rows
from open_instruct.users_code import load_named

if TYPE_CHECKING:
    from olmo_core.train.callbacks import Callback

OBJECTIVE_FLAG = "--objective"
USAGE = f"""\
usage: open-instruct train {OBJECTIVE_FLAG} FILE.py:NAME [FILE.yaml] [--flag value ...]

Trains an objective of your own (docs/your_own_loss.md); behind it, --help lists its flags.
Those that are built in are commands of their own: {", ".join(OBJECTIVES)}."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the objective that `--objective` names with the other flags in `argv`; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_to_exit_code(lambda: _run_own(words), program=typed("train.py"))


def _run_own(words: list[str]) -> int:
    if OBJECTIVE_FLAG not in words[:-1]:
        if asks_for_help(words):
            print(USAGE)
            return 0
        raise InputError(f"give {OBJECTIVE_FLAG} FILE.py:NAME\n{USAGE}")
    at = words.index(OBJECTIVE_FLAG)
    word = words[at + 1]
    objective = load_named(word, origin=f"{OBJECTIVE_FLAG} {word}", what="NAME")
    if not isinstance(objective, Objective):
        raise InputError(
            f"{OBJECTIVE_FLAG} {word} is no objective; make it an open_instruct.objectives.objective.Objective"
        )
    return run_objective(objective, words[:at] + words[at + 2 :], own=words[at : at + 2])


def entry_of(objective: Objective, module: str) -> Callable[..., int]:
    """The public `main` of the file of `objective`, called at once where that `module` is the program.

    It runs with the flags in its argument (default: the command line) and returns the exit code.
    """
    main = partial(run_objective, objective)
    if module == "__main__":
        leave(main())
    return main


def run_objective(objective: Objective, argv: Sequence[str] | None = None, *, own: Sequence[str] = ()) -> int:
    """Train `objective` with the flags in `argv` (default: the command line) and return the exit code.

    `own` are the words that name it, where it is not built in.
    """
    file = Path(__file__) if own else Path(__file__).with_name(objective.program)
    return run_entry(
        objective.config_class,
        partial(train, objective=objective),
        argv,
        program=objective.program,
        validate=objective.validate,
        look=partial(look_at_run, objective=objective),
        script=(file, own) if file.is_file() else None,
    )


def look_at_run(config: TrainingConfig, *, objective: Objective) -> None:
    """:raises InputError: what the flags name, or the first of the rows, will not do, as far as shows without torch."""
    look_at(config)
    form, data = objective.rows_of(config), config.data
    if (check := vars(form).get("check")) is not None:
        look_at_rows(form, config, "--mixer_list", data.mixer_list, data.mixer_list_splits, check=check)
        look_at_rows(form, config, "--eval_mixer_list", data.eval_mixer_list, data.eval_mixer_list_splits, check=check)


def train(config: TrainingConfig, *, objective: Objective, callbacks: Mapping[str, Callback] | None = None) -> int:
    """The whole run, as every rank walks it; `callbacks` are OLMo-core's, by name. Returns the exit code."""
    # torch, and all that hangs on it, loads only once the flags are known to be good.
    from open_instruct.data.token_dataset import cache_root
    from open_instruct.learner.export import export_policy
    from open_instruct.learner.heldout import Heldout
    from open_instruct.learner.loop import Loop
    from open_instruct.learner.policy import Policy
    from open_instruct.learner.reference_cache import open_reference_cache, reference_logprobs
    from open_instruct.learner.rows.sample_loader import SampleLoader
    from open_instruct.learner.scoring import Scorer
    from open_instruct.learner.teacher import OpenedTeacher
    from open_instruct.learner.teacher_rows import compare_with
    from open_instruct.models.lora.adapters import adapters_off
    from open_instruct.packing.balance import best_fit
    from open_instruct.packing.steps import BatchShape
    from open_instruct.run.datasets import load_datasets
    from open_instruct.run.opened import open_run
    from open_instruct.run.plan_check import planned_run
    from open_instruct.run.pretrained import open_pretrained
    from open_instruct.run.signals import stopped_by
    from open_instruct.run.start_model import start_model_of
    from open_instruct.run.trackers import logging_steps
    from open_instruct.wording import counted

    if config.data.eval_mixer_list and objective.evaluate is None:
        raise InputError(f"--eval_mixer_list: {objective.name} has no `evaluate`; write one, or leave the flag out")
    backend = backend_named(config.parallel.backend)
    with open_run(config, objective.name) as run:
        pretrained = open_pretrained(config, run.directory.hf_model, layout=run.layout, head=objective.head)
        more_config = dict(objective.exported(config, pretrained.tokenizer, pretrained.hf_config))
        form, own = objective.rows_of(config), objective.row_arguments(config)
        read = partial(load_datasets, form, config, pretrained=pretrained, console=run.console, own=own)
        if config.data.cache_dataset_only:
            read()
            return 0
        config = planned_run(config, run, pretrained.folder)
        loss = objective.bound(config, pretrained.tokenizer)
        if pretrained.adapter is not None:
            loss = replace(loss, first_loss=None)  # the reference is the model without the adapter
        start_model = start_model_of(pretrained, run)
        taught = objective.teacher(config)
        teacher = None if taught is None else OpenedTeacher.of(taught, pretrained, config=config, layout=run.layout)
        rows, heldout_rows = read()
        shape = BatchShape.of(
            config.optim,
            config.data,
            run.layout,
            documents_per_sample=form.documents_per_row,
            pad_token_id=pretrained.pad_token_id,
            prefix_sharing=objective.prefix_sharing(config),
        )
        samples: Sequence[Sequence[int]] = [(row,) for row in range(len(rows))]
        if objective.fills_packs(config):
            samples = best_fit(range(len(rows)), rows.num_tokens.tolist(), shape.max_seq_length)
        num_steps = shape.num_steps(len(samples), optim=config.optim, layout=run.layout)
        num_rows_per_step = shape.max_samples_per_rank * run.layout.data_parallel_world_size
        save_interval = config.run.checkpointing_steps or shape.num_steps_per_epoch(len(samples), layout=run.layout)
        for warning in (*pretrained.warnings, *objective.check_rows(rows, num_rows_per_step, config)):
            run.console.warn(warning)

        policy = Policy(backend.build(pretrained, run=run, config=config, num_steps=num_steps), loss)
        scorer = Scorer(policy, shape=shape, console=run.console)

        if teacher is not None:
            policy.comparison, rows, heldout_rows = compare_with(
                teacher, rows, heldout_rows, student=pretrained, scorer=scorer, run=run, config=config
            )
        scores, moves = {}, objective.reference_moves(config)
        heldout_reference_ND = None
        if objective.needs_reference(config):
            folder = cache_root(config.data.cache_dir) / "reference_logprobs"
            if policy.loss.ld_alpha is not None:
                folder /= f"ld-{policy.loss.ld_alpha}"
            cache = open_reference_cache(folder, pretrained, model=config.model, shape=shape)
            with adapters_off(policy.model):
                if not moves.get("update_freq"):
                    scores[REFERENCE] = reference_logprobs(scorer, rows, cache=cache, title="reference log-probs")
                if heldout_rows is not None:
                    title = "held-out reference log-probs"
                    heldout_reference_ND = reference_logprobs(scorer, heldout_rows, cache=cache, title=title)
            if objective.only_scores(config):
                run.console.say(f"reference log-probs of {counted(len(cache), 'row')}: {cache.path}")
                return 0

        if moves.get("update_freq"):
            policy.reference = policy.backend.moving_reference(pretrained, run=run, config=config, **moves)
        loader = SampleLoader(
            rows,
            samples,
            scores=scores,
            shape=shape,
            seed=config.optim.seed,
            dp_group=policy.dp_process_group,
        )
        loop = Loop(
            policy,
            loader,
            run=run,
            config=config,
            start_model=start_model,
            num_steps=num_steps,
            max_tokens_per_step=loader.max_tokens_per_step,
            save_interval=save_interval,
            callbacks=callbacks,
        )
        if loop.resume(warn=run.console.warn):
            run.console.say(f"resuming after step {loop.step} of {num_steps}")
        heldout = None
        if heldout_rows is not None:
            heldout = Heldout(heldout_rows, heldout_reference_ND, scorer, objective=objective, config=config, run=run)
            if heldout.is_due(loop.step, num_steps):
                heldout.evaluate(loop.step)
        with logging_steps(run, config, first_step=loop.step, num_steps=num_steps) as on_step:
            signal = loop.fit(loader, on_step=on_step, heldout=heldout)
        if signal is not None:
            message, code = stopped_by(signal, step=loop.step, folder=run.directory.path)
            run.console.say(message)
            return code

        if heldout is not None:
            more_config |= heldout.evaluate(loop.step).exported
        export_policy(policy, pretrained, run=run, config=config, trained_by=objective.name, more_config=more_config)
        return 0


if __name__ == "__main__":
    leave(main())
