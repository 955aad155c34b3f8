"""Which cases of a table are in which tier of the tests."""

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
