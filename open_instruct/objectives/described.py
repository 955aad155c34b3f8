"""The run that words describe, such as those after `open-instruct plan`: the name of its command, then its flags."""

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from typing import Any

from open_instruct.config.parser import nearest, parse
from open_instruct.errors import InputError
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import objective_named, objective_names
from open_instruct.wording import one_of


def config_class_of(name: str, **more: type) -> Any:
    """The flags of the run `name` with `more` sections, by the field that holds each."""
    run = objective_named(name).config_class
    return make_dataclass(run.__name__, more.items(), bases=(run,), kw_only=True)


def described_run(
    words: Sequence[str], *, assumed: Mapping[str, Any], example: str, **more: type
) -> tuple[Any, Objective, list[str]]:
    """The config of the run, with `more` sections, and its objective; and warnings of flags that a run does not need.

    Args:
        assumed: values for flags that may be left out here.
        example: the beginning of a command that would do.

    Raises:
        InputError: there is no such run, or a flag is wrong.
    """
    name = words[0] if words else ""
    names = objective_names()
    if name not in names:
        given = f"'{name}' is not a run{nearest(name, names)}; " if name else ""
        raise InputError(f"{given}the first word is {one_of(names)}: {example} ...")
    unneeded: list[str] = []
    config = parse(config_class_of(name, **more), words[1:], assumed=assumed, unneeded=unneeded)
    return config, objective_named(name), [f"not needed here, and left out: {each}" for each in unneeded]
