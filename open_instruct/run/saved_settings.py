"""Reads the settings of a run that has ended, from a config.yaml of this or another version."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from open_instruct.config.flags import list_flags
from open_instruct.config.parser import COMMAND, parse
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import one_line
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import list_objectives, load_objective
from open_instruct.run.run_directory import RunDirectory

MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSettings:
    """A run's flags, its objective, and where its file differs from what is written now.

    Example: of a run whose config.yaml has a flag that is gone, `notes` is
    `("runs/first/config.yaml is of another version: passed over `old_flag: 1`",)`.
    """

    config: LearnerConfig
    objective: Objective
    notes: tuple[str, ...] = ()

    def print_notes(self) -> None:
        for note in self.notes:
            print(note, file=sys.stderr)


def read_settings(run: Path) -> SavedSettings:
    """Read the settings of the run in a folder.

    A flag that this version lacks is passed over, and so is a value that it no longer takes, where
    nothing is learned differently. A flag that the file lacks has its default. Notes name them all.

    :raises InputError: there is no such run, it had an objective of one's own, or a value cannot be
        read.
    """
    directory = RunDirectory(path=run)
    directory.refuse_foreign_files()
    path = directory.config
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping of flags")
        command = values[COMMAND] if COMMAND in values else _guess_command(values)
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise InputError(
            f"{run} is not the --output_dir of a run: {path} cannot be read as its settings "
            f"({one_line(error)})",
            kind="bad_checkpoint",
        ) from None
    if command not in list_objectives():
        raise InputError(
            f"{path} is of an objective of your own, {command}: give the run's command again to "
            "end it with an export",
            kind="own_code",
        )
    objective = load_objective(command)
    passed_over: list[str] = []
    config: LearnerConfig = parse(objective.config_class, [str(path)], passed_over=passed_over)
    lacking = [name for name in list_flags(objective.config_class) if name not in values]
    notes = []
    if COMMAND not in values:
        notes.append(
            f"{path} names no command, as that of an early version: it is read as that of {command}"
        )
    if passed_over:
        settings = _list_names([f"`{each}`" for each in passed_over])
        notes.append(f"{path} is of another version: passed over {settings}")
    if lacking:
        names = _list_names(lacking)
        notes.append(f"{path} lacks flags of this version, which have their defaults: {names}")
    return SavedSettings(config=config, objective=objective, notes=tuple(notes))


def _guess_command(values: Mapping[str, Any]) -> str:
    """The command whose flags are most like those of a file that names none.

    :raises ValueError: the file lacks a flag that every command must be given.
    """

    def count_differences(command: str) -> tuple[int, int]:
        flags = list_flags(load_objective(command).config_class)
        return len(values.keys() - flags.keys()), len(flags.keys() - values.keys())

    command = min(list_objectives(), key=count_differences)
    missing = []
    for name, flag in list_flags(load_objective(command).config_class).items():
        if flag.required and name not in values:
            missing.append(name)
    if missing:
        raise ValueError(f"it has no {COMMAND} and no {', '.join(missing)}")
    return command


def _list_names(names: list[str]) -> str:
    text = ", ".join(names[:MAX_NAMED])
    if len(names) <= MAX_NAMED:
        return text
    return f"{text} and {len(names) - MAX_NAMED} more"
