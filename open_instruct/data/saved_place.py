"""Check that a place in the data, saved in a checkpoint, means the same rows in this run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFact:
    """Something that a saved place depends on, and how a run that differs in it is refused.

    Example: `PlaceFact(key="seed", value=3, flag="seed", problem="--seed was 1, is 3", remedy="give
    --seed 1")`.
    """

    key: str
    """The fact's name in the saved place."""
    value: Any
    """The fact's value in this run."""
    flag: str
    problem: str
    remedy: str


def make_rows_fact(
    fingerprint: str,
    *,
    key: str = "data_fingerprint",
    flag: str,
    limit: str,
) -> PlaceFact:
    """The fact that the rows of a mixer list are those of the checkpoint.

    Args:
        fingerprint: of this run's rows.
        key: of the fingerprint in the saved place.
        flag: the mixer list, without dashes.
        limit: the flag that cuts the rows.
    """
    return PlaceFact(
        key=key,
        value=fingerprint,
        flag=flag,
        problem=(
            f"the rows of --{flag}, as they are tokenised, are not those that the checkpoint was "
            "written with"
        ),
        remedy=f"give the same rows, template and {limit}",
    )


def make_seed_fact(saved: Mapping[str, Any], seed: int) -> PlaceFact:
    """The fact that rows come in the checkpoint's order."""
    saved_seed = saved.get("seed")
    return PlaceFact(
        key="seed",
        value=seed,
        flag="seed",
        problem=f"the checkpoint was written with --seed {saved_seed}, this run has {seed}",
        remedy=f"give --seed {saved_seed}",
    )


def check_saved_place(saved: Mapping[str, Any], *facts: PlaceFact) -> None:
    """Refuse a saved place that would mean other rows in this run.

    Args:
        saved: the place, from the checkpoint; a fact that it lacks, as one of an older version may,
            is passed over.
        facts: what the place depends on.

    Raises:
        InputError: a fact differs; the message is of the first.
    """
    for fact in facts:
        if saved.get(fact.key, fact.value) == fact.value:
            continue
        remedy = (
            f"{fact.remedy}, or start afresh with another --output_dir or --overwrite_output_dir"
        )
        raise InputError(
            f"{fact.problem}: {remedy}", kind="other_run", flag=fact.flag, remedy=remedy
        )
