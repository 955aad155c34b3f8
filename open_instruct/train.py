"""The entry of every offline objective: flags are parsed and checked, and then
`training/offline.py` walks the run.

`dpo.py`, `sft.py` and the other entries are this file with an objective; with one of your own it is

    open-instruct train --objective mine.py:MINE --num_processes 2 --output_dir OUT ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.process import (
    check_in_place_of_run,
    command_as_typed,
    exit_process,
    run_entry,
    run_to_exit_code,
)
from open_instruct.config.help import asks_for_check, asks_for_help
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError
from open_instruct.core.user_code import load_named
from open_instruct.data.tokenizer import find_local_folder
from open_instruct.models.hf.head_kinds import check_head
from open_instruct.models.model_folder import read_model_fields
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import OBJECTIVES
from open_instruct.run.earlier_command import refuse_another_command
from open_instruct.run.first_look import check_first_rows, check_paths

if TYPE_CHECKING:
    from olmo_core.train.callbacks import Callback

OBJECTIVE_FLAG = "--objective"
USAGE = f"""\
usage: open-instruct train {OBJECTIVE_FLAG} FILE.py:NAME [FILE.yaml] [--flag value ...]

Trains an objective of your own (docs/your_own_loss.md); behind it, --help shows its flags.
Those that are built in are commands of their own: {", ".join(OBJECTIVES)}."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the objective that `--objective` names with the other flags in `argv`; returns the exit
    code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    return run_to_exit_code(lambda: _run_own(words), program=command_as_typed("train.py"))


def _run_own(words: list[str]) -> int:
    if OBJECTIVE_FLAG not in words[:-1]:
        if asks_for_help(words):
            print(USAGE)
            return 0
        raise InputError(f"give {OBJECTIVE_FLAG} FILE.py:NAME\n{USAGE}", kind="missing_flag")
    at = words.index(OBJECTIVE_FLAG)
    word = words[at + 1]
    objective = load_named(word, origin=f"{OBJECTIVE_FLAG} {word}", what="NAME")
    if not isinstance(objective, Objective):
        raise InputError(
            f"{OBJECTIVE_FLAG} {word} is no objective; make it an instance of a subclass of "
            "open_instruct.objectives.objective.Objective, as in NAME = MyObjective()",
            kind="own_code",
        )
    return run_objective(objective, words[:at] + words[at + 2 :], naming_words=words[at : at + 2])


def make_main(objective: Objective) -> Callable[..., int]:
    """The public `main` of the file of `objective`.

    It runs with the flags in its argument (default: the command line) and returns the exit code.
    """
    return partial(run_objective, objective)


def run_objective(
    objective: Objective, argv: Sequence[str] | None = None, *, naming_words: Sequence[str] = ()
) -> int:
    """Train `objective` with the flags in `argv` (default: the command line) and return the exit
    code.

    `naming_words` are the words that name it, where it is not built in.
    """
    program = f"{objective.name}.py"
    words = sys.argv[1:] if argv is None else list(argv)
    if asks_for_check(words):
        return check_in_place_of_run(partial(check, objective=objective), words, program=program)
    file = Path(__file__) if naming_words else Path(__file__).with_name(program)
    return run_entry(
        objective.config_class,
        partial(train, objective=objective),
        argv,
        program=program,
        validate=objective.validate,
        look=partial(preflight, objective=objective),
        script=(file, naming_words) if file.is_file() else None,
    )


def check(words: Sequence[str], *, objective: Objective) -> int:
    """Look at everything that a run with these words could be refused for; returns the exit
    code.
    """
    from open_instruct.commands.check import check_run

    return check_run(objective, words)


def preflight(config: TrainingConfig, *, objective: Objective) -> None:
    """:raises InputError: what the flags name, or the first of the rows, will not do, as far as
    shows without torch.
    """
    refuse_another_command(config.run, objective.name)
    check_paths(config)
    if (folder := find_local_folder(config.model.config_path)) is not None:
        check_head(read_model_fields(folder)["model_type"], objective.choose_head(config))
    form = objective.choose_rows(config)
    if (check := vars(form).get("check")) is not None:
        check_first_rows(
            form,
            config.data,
            "mixer_list",
            "eval_mixer_list",
            seed=config.optim.seed,
            check=check,
        )


def train(
    config: TrainingConfig, *, objective: Objective, callbacks: Mapping[str, Callback] | None = None
) -> int:
    """The whole run, as every rank walks it.

    `callbacks` are OLMo-core's, by name. Returns the exit code.
    """
    # torch, and all that hangs on it, loads only once the flags are known to be good.
    from open_instruct.training import offline

    return offline.train(config, objective=objective, callbacks=callbacks)


if __name__ == "__main__":
    exit_process(main())
