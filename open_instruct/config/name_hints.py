"""Hints about a name that is no flag: the nearest one, or what another suite's is called here."""

import difflib
from collections.abc import Iterable
from functools import cache

from open_instruct.config.suites.upstream_flags import read_table


def suggest_nearest(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean X?` with the known name closest to `name`, or an empty string."""
    names = list(names)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    if not close and len(name) > 2:
        close = [other for other in names if name.lower() in other][:1]
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def describe_name_here(name: str, names: Iterable[str], prefix: str) -> str | None:
    """The end of `--name …`: the flag among `names` that does what the other suite's `name` does;
    None without a hint.

    Example: of `num_generations`, `is called --num_samples_per_prompt_rollout here`.
    """
    hint = _hint_about(name)
    if hint is None or isinstance(hint, str):
        return hint
    if isinstance(hint, dict):
        return next(
            (sentence for flag, sentence in hint.items() if flag in names), hint.get("else")
        )
    ours = find_flag_here(name, names)
    return None if ours is None else f"is called {prefix}{ours} here"


def find_flag_here(name: str, names: Iterable[str]) -> str | None:
    """The flag among `names` that only has another name in the other suite, or None."""
    hint = _hint_about(name)
    if not isinstance(hint, list):
        return None
    return next((flag for flag in hint if flag in names), None)


def _hint_about(name: str) -> str | list[str] | dict[str, str] | None:
    """What the table has of a name, or of the last parts of a dotted one."""
    table = names_of_other_suites()
    return (
        table.get(name)
        or table.get(".".join(name.split(".")[-2:]))
        or table.get(name.split(".")[-1])
    )


@cache
def names_of_other_suites() -> dict[str, str | list[str] | dict[str, str]]:
    """The hint for each name of another suite: flags of ours, a sentence, or a sentence a flag."""
    table = read_table("other_suites.yaml")
    hints: dict[str, str | list[str] | dict[str, str]] = {}
    for names, hint in table.items():
        hints |= dict.fromkeys(names.split(", "), hint)
    return hints
