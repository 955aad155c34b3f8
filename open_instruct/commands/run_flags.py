"""The flags of a run as a command reads them: parsed, and joined with their backend.

`--backend` names an entry point of an installed package in the group `open_instruct.backends`. Its
object is a `BackendRecord`; ours stand in pyproject.toml.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.parser import parse
from open_instruct.config.training import BackendRecord, ConfigT
from open_instruct.core.errors import InputError
from open_instruct.core.text import join_choices
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import build_config_class, list_objectives, load_objective
from open_instruct.parallel.resolve import resolve

GROUP = "open_instruct.backends"


@cache
def find_backend(name: str) -> BackendRecord:
    """:raises InputError: no installed backend has this name."""
    backends = {each.name: each for each in entry_points(group=GROUP)}
    if not backends:
        raise InputError(
            "no backend is installed: run `make install`, or `pip install .`, once more",
            kind="missing_package",
        )
    if name not in backends:
        raise InputError(
            f"--backend {name}: takes "
            f"{' or '.join(sorted(backends))}{suggest_nearest(name, backends)}",
            kind="bad_value",
        )
    record: BackendRecord = backends[name].load()
    return record


def join_backend(config: ConfigT) -> ConfigT:
    """The config joined with the installed backend that its flags name.

    :raises InputError: there is none of this name.
    """
    return resolve(config, find_backend(config.parallel.backend))


def parse_run(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    assumed: Mapping[str, Any] | None = None,
    unneeded: list[str] | None = None,
    passed_over: list[str] | None = None,
) -> ConfigT:
    """The configuration of a run that `argv` describes; see `parse` for the arguments.

    :raises InputError: a flag is wrong, or no installed backend has the name of `--backend`.
    """
    config = parse(config_class, argv, assumed=assumed, unneeded=unneeded, passed_over=passed_over)
    return join_backend(config)


def parse_named_run(
    words: Sequence[str],
    *,
    assumed: Mapping[str, Any],
    example: str,
    **more: type,
) -> tuple[Any, Objective, list[str]]:
    """Parse a run from the name of its command and its flags, as `open-instruct plan` has them.

    Returns its config, with `more` sections, its objective, and warnings of flags that it does not
    need.

    Args:
        assumed: values for flags that may be left out here.
        example: the beginning of a command that would do.

    Raises:
        InputError: there is no such run, or a flag is wrong.
    """
    name = words[0] if words else ""
    names = list_objectives()
    if name not in names:
        mistake = f"'{name}' is not a run{suggest_nearest(name, names)}; " if name else ""
        raise InputError(
            f"{mistake}the first word is {join_choices(names)}: {example} ...", kind="stray_word"
        )
    unneeded: list[str] = []
    config_class = build_config_class(name, **more)
    config = parse_run(config_class, words[1:], assumed=assumed, unneeded=unneeded)
    warnings = [f"not needed here, and left out: {each}" for each in unneeded]
    return config, load_objective(name), warnings
