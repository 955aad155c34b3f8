"""What a flag of another suite is called here: hints for users who come from there, read from other_suites.yaml."""

from collections.abc import Collection
from functools import cache

from open_instruct.config.suites.upstream_flags import read_table


def called_here(name: str, known: Collection[str], prefix: str = "") -> str | None:
    """The end of `--name …`: the flag among `known` that does what the other suite's `name` does; None without a hint.

    Example: of `num_generations`, `is called --num_samples_per_prompt_rollout here`.
    """
    table = names_of_other_suites()
    hint = table.get(name) or table.get(".".join(name.split(".")[-2:])) or table.get(name.split(".")[-1])
    if hint is None or isinstance(hint, str):
        return hint
    ours = next((flag for flag in hint if flag in known), None)
    return None if ours is None else f"is called {prefix}{ours} here"


@cache
def names_of_other_suites() -> dict[str, str | list[str]]:
    """Flags of ours, or a sentence, by the other suite's name."""
    table = read_table("other_suites.yaml")
    return {name: hint for names, hint in table.items() for name in names.split(", ")}
