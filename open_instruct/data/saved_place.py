"""The check that a checkpoint's position in the data means the same rows in this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_instruct.errors import InputError


def check_saved_place(state_dict: Mapping[str, Any], *facts: tuple[str, Any, str]) -> None:
    """Refuse a saved position that would mean other rows in this run.

    Args:
        state_dict: the saved position, from the checkpoint.
        facts: what the position depends on: each a key of `state_dict`, the value in this run, and the remedy if the
            two differ.

    Raises:
        InputError: a fact differs; the message names the first.
    """
    for key, ours, remedy in facts:
        if state_dict[key] != ours:
            raise InputError(
                f"the checkpoint was written with {key} {state_dict[key]}, this run has {ours}: {remedy}, or start "
                "afresh with another --output_dir or --overwrite_output_dir"
            )
