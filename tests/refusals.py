"""A refusal by what it carries, not by its words: the kind of problem, its flag, and what its
sentence must name.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from open_instruct.core.errors import InputError


@contextmanager
def refused(
    kind: str, flag: str | None = None, *names: str
) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """The block raises an `InputError` with a problem of this `kind`.

    Args:
        kind: see `open_instruct.core.errors.Kind`.
        flag: the name of the flag that the problem is about; None where the test does not say.
        names: what the sentence has in it: a number, a file, a column, another flag.
    """
    with pytest.raises(InputError) as caught:
        yield caught
    problems = caught.value.problems
    of_this_kind = [each for each in problems if each.kind == kind and flag in (None, each.flag)]
    found = [(each.kind, each.flag, str(each)) for each in problems]
    assert of_this_kind, f"no problem of kind {kind}, flag {flag} among {found}"
    assert any(all(has_name(each, name) for name in names) for each in of_this_kind), (
        f"not all of {names}: {found}"
    )


def has_name(sentence: str, name: str) -> bool:
    """Whether the sentence has the name, and not as a part of a longer word or number."""
    start = r"(?<!\w)" if name[0].isalnum() else ""
    start += r"(?<!\d\.)" if name[0].isdigit() else ""
    return re.search(rf"{start}{re.escape(name)}(?!\w|\.\d)", sentence) is not None
