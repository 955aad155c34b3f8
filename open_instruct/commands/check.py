"""`open-instruct check`: finds everything that a run would be refused for, and starts nothing."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

from open_instruct.commands.checks.report import FLAGS, Report
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.parser import list_given_flags
from open_instruct.config.sections import flag
from open_instruct.core.errors import InputError
from open_instruct.core.garbage import no_garbage_collection
from open_instruct.core.text import join_choices, spell_count
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import list_objectives, load_objective


@dataclass(kw_only=True)
class CheckFlags:
    """Look at everything that a run could be refused for, and start nothing: flags, output folder,
    model, tokenizer and template, rows, memory; of GRPO also verifiers, reward functions (each
    called on two made-up answers), a judge, environments and MCP servers (each asked once). Takes
    the flags or the YAML file of the training command, which does the same with --check. Nothing is
    written to --output_dir. Exit code 0, or 2 with every refusal.

    Examples:
        open-instruct check dpo --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0
            --output_dir OUT
        open-instruct check grpo grpo/tiny_cpu --model_name_or_path MODEL_DIR --dataset_mixer_list
            p.jsonl 1.0
            --output_dir OUT --with_model
    """

    with_model: bool = flag(
        "also load the model, and take the loss of a first microbatch, on one process", False
    )


def main(argv: Sequence[str]) -> int:
    """Check the run that the words after the command describe; returns the exit code.

    Raises:
        InputError: the run would be refused, with every reason that was found.
    """
    name = argv[0] if argv else ""
    names = list_objectives()
    if name not in names:
        mistake = f"'{name}' is not a run{suggest_nearest(name, names)}; " if name else ""
        example = "open-instruct check dpo --mixer_list ..."
        raise InputError(
            f"{mistake}the first word is {join_choices(names)}: {example}", kind="stray_word"
        )
    with no_garbage_collection():
        return check_run(load_objective(name), argv[1:])


def check_run(
    objective: Objective, words: Sequence[str], *, config_class: type | None = None
) -> int:
    """Check the run of `objective` with the flags in `words`; returns the exit code.

    Args:
        config_class: has the flags; default: those of the objective.

    Raises:
        InputError: the run would be refused, with every reason that was found.
    """
    run_class = config_class or objective.config_class
    checked_class: Any = make_dataclass(
        run_class.__name__, [("check", CheckFlags)], bases=(run_class,), kw_only=True
    )
    unneeded: list[str] = []
    # Without flags there is nothing to check.
    config: Any = parse_run(checked_class, words, unneeded=unneeded)
    for each in unneeded:
        print(f"warning: not needed here, and left out: {each}", file=sys.stderr)

    def validate() -> str:
        warnings = objective.validate(config)
        num_given = spell_count(len(list_given_flags(checked_class, words)), "flag")
        return "\n".join(
            [f"{num_given}, and they go together", *(f"warning: {each}" for each in warnings)]
        )

    report = Report()
    report.check(FLAGS, validate)
    from open_instruct.commands.checks.run_checks import check_parts

    check_parts(config, objective, report, with_model=config.check.with_model)
    return report.conclude(str(Path(config.run.output_dir)))
