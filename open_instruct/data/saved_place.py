"""When a place in the data that a checkpoint holds is the same place in this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_instruct.errors import InputError


def check_saved_place(state_dict: Mapping[str, Any], *facts: tuple[str, Any, str]) -> None:
    """Refuse a place that means another one here.

    Args:
        state_dict: of the checkpoint.
        facts: that the place depends on, each as its key in `state_dict`, its value in this run, and the remedy where
            the two are not equal.

    Raises:
        InputError: one of them is another; names the first.
    """
    for key, ours, remedy in facts:
        if state_dict[key] != ours:
            raise InputError(
                f"the checkpoint was written with {key} {state_dict[key]}, this run has {ours}: {remedy}, or start "
                "afresh with another --output_dir or --overwrite_output_dir"
            )
