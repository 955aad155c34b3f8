"""Functions of losses are registered with the flags that they take."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.mismatch import MISMATCH_FLAGS, correct_mismatch
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.preference import PREFERENCE_LOSSES

REGISTERED = {
    **{f"advantages {name}": (each.function, each.flags) for name, each in ADVANTAGES.items()},
    **{f"policy {name}": (each.function, each.flags) for name, each in POLICY_LOSSES.items()},
    **{
        f"preference {name}": (each.function, each.flags)
        for name, each in PREFERENCE_LOSSES.items()
    },
    **{
        f"marks of {name}": (each.marks, each.marks_flags)
        for name, each in POLICY_LOSSES.items()
        if each.marks is not None
    },
    "mismatch": (correct_mismatch, MISMATCH_FLAGS),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_flags_are_the_arguments_that_a_function_takes(name: str) -> None:
    function: Callable[..., Any]
    function, flags = REGISTERED[name]
    parameters = inspect.signature(function).parameters.values()
    assert set(flags) == {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
