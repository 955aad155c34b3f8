"""Refuses a folder that holds another command's run, before torch is loaded."""

from pathlib import Path

import yaml

from open_instruct.config.parser import COMMAND, read_yaml_nodes
from open_instruct.config.run_sections import RunSection
from open_instruct.core.errors import InputError
from open_instruct.run.run_directory import RunDirectory


def refuse_another_command(run: RunSection, command: str) -> None:
    """Refuse a folder in which a run of another command has left checkpoints or a model.

    :raises InputError: names both commands.
    """
    directory = RunDirectory(path=Path(run.output_dir))
    if run.overwrite_output_dir or not directory.has_results():
        return
    earlier = read_command(directory.config)
    if earlier is not None and earlier != command:
        raise InputError(
            f"{directory.path} holds a run of {earlier}, and this one is of {command}: give "
            "another --output_dir",
            kind="other_run",
            flag="output_dir",
        )


def read_command(path: Path) -> str | None:
    """The command that wrote a config.yaml; None if it names none, or cannot be read."""
    try:
        nodes = read_yaml_nodes(str(path))
    except InputError:  # which a later check raises again
        return None
    for key, value in nodes:
        if key.value == COMMAND:
            return value.value if isinstance(value, yaml.ScalarNode) else None
    return None
