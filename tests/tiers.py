"""What of a test is in which tier: cases of tables, and how many drawn examples."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def mark_extended(cases: Iterable[Any], *, but: Collection[Any]) -> list[ParameterSet]:
    """Cases for `pytest.mark.parametrize`:

    `make test` runs those in `but`, and `make test-all` the others too.
    """
    cases = list(cases)
    assert {*but} <= {*cases}, "a case of the quick tier is not in the table"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in but else pytest.mark.extended,
        )
        for case in cases
    ]


def num_examples(most: int) -> int:
    """How many examples a property is tried on: `most` in `make test-all`, a third in `make test`.

    They are others in every run, so that few a run come to many.
    """
    return most if os.environ.get("ALL_EXAMPLES") else max(3, most // 3)
