"""Every verifier there is: ours, those of installed packages, and those named by `--verifier`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from open_instruct.errors import InputError
from open_instruct.verifiers.answers import GSM8K, Passthrough, R1Format, StringF1, StringMatcher
from open_instruct.verifiers.ifeval import IFEval
from open_instruct.verifiers.math_answers import Math
from open_instruct.verifiers.own_code import own_module
from open_instruct.verifiers.verifier import Verifier

BUILT_IN: tuple[type[Verifier], ...] = (GSM8K, IFEval, Math, StringMatcher, StringF1, Passthrough, R1Format)
ENTRY_POINT_GROUP = "open_instruct.verifiers"


def known_verifiers(user: Sequence[str] = ()) -> dict[str, Verifier]:
    """Verifiers by name; `user` are words of `--verifier`, each `FILE.py:Class` or `module:Class`.

    Raises:
        InputError: one cannot be imported, is not a `Verifier`, or has the name of another.
    """
    verifiers = {kind.name: kind() for kind in BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        _add(verifiers, f"the entry point {point.name} = {point.value}", point.value)
    for word in user:
        _add(verifiers, f"--verifier {word}", word)
    return verifiers


def _add(verifiers: dict[str, Verifier], origin: str, word: str) -> None:
    where, _, class_name = word.rpartition(":")
    try:
        kind: Any = getattr(own_module(where), class_name)
    except (Exception, SystemExit) as error:  # it is foreign code, which may raise anything
        raise InputError(
            f"{origin} cannot be loaded ({type(error).__name__}: {error}); it takes FILE.py:Class, or module:Class "
            "of a module that is installed or lies in the working folder"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Verifier) and isinstance(getattr(kind, "name", None), str)):
        raise InputError(
            f"{origin} is not a verifier; make it a subclass of open_instruct.verifiers.verifier.Verifier with a name "
            "and a score method"
        )
    if kind.name in verifiers:
        raise InputError(f"{origin} is called {kind.name!r}, as another verifier is; give it a name of its own")
    try:
        verifiers[kind.name] = kind()
    except Exception as error:
        raise InputError(f"{origin} cannot be made without arguments ({type(error).__name__}: {error})") from error
