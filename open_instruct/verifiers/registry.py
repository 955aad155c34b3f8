"""Every verifier there is: ours, those of installed packages, and those named by `--verifier`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import entry_points

from open_instruct.config.parser import nearest
from open_instruct.errors import InputError
from open_instruct.users_code import load_named
from open_instruct.verifiers.answers import GSM8K, Passthrough, R1Format, StringF1, StringMatcher
from open_instruct.verifiers.function import RewardFunction
from open_instruct.verifiers.ifeval import IFEval
from open_instruct.verifiers.judge_models import ProcessRewardVerifier, RewardModelVerifier
from open_instruct.verifiers.math_answers import Math
from open_instruct.verifiers.verifier import Verifier

BUILT_IN: tuple[type[Verifier], ...] = (GSM8K, IFEval, Math, StringMatcher, StringF1, Passthrough, R1Format)
OF_FOLDERS = {kind.name: kind for kind in (RewardModelVerifier, ProcessRewardVerifier)}
ENTRY_POINT_GROUP = "open_instruct.verifiers"


def known_verifiers(user: Sequence[str] = ()) -> dict[str, Verifier]:
    """Verifiers by name; `user` are words of `--verifier`, each the name of one, or `FILE.py:NAME` or
    `module:NAME` of a class or a function.

    `reward_model:FOLDER` and `prm:FOLDER` are verifiers too: what a run of ours has exported.

    Raises:
        InputError: one cannot be imported, is not a `Verifier`, or has the name of another; a folder will not do.
    """
    verifiers = {kind.name: kind() for kind in BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        _add(verifiers, f"the entry point {point.name} = {point.value}", point.value)
    for word in user:
        name, colon, settings = word.partition(":")
        if name in OF_FOLDERS and name not in verifiers:
            verifiers[name] = OF_FOLDERS[name](settings)
        elif colon:
            _add(verifiers, f"--verifier {word}", word)
    if unknown := [word for word in user if ":" not in word and word not in verifiers]:
        raise InputError(
            f"--verifier {unknown[0]}: there is no verifier of that name{nearest(unknown[0], verifiers) or ';'} known "
            f"are {', '.join(sorted(verifiers))}, and FILE.py:NAME or module:NAME of your own"
        )
    return verifiers


def judges_named(user: Sequence[str]) -> list[str]:
    """The names of the verifiers that `--verifier` has words of: they judge rows that name none."""
    names = [word.partition(":")[0] for word in user]
    return [
        name if name == word or name in OF_FOLDERS else _own(word, f"--verifier {word}").name
        for name, word in zip(names, user, strict=True)
    ]


def _add(verifiers: dict[str, Verifier], origin: str, word: str) -> None:
    verifier = _own(word, origin)
    if verifier.name in verifiers:
        raise InputError(f"{origin} is called {verifier.name!r}, as another verifier is; give it a name of its own")
    verifiers[verifier.name] = verifier


def _own(word: str, origin: str) -> Verifier:
    """What somebody has written: a class of verifiers, or a function that gives rewards."""
    named = load_named(word, origin=origin, what="NAME")
    if inspect.isfunction(named):
        return RewardFunction(named)
    if not (isinstance(named, type) and issubclass(named, Verifier) and isinstance(getattr(named, "name", None), str)):
        raise InputError(
            f"{origin} is neither a function nor a verifier; write `def reward(completions, **columns)`, or make it a "
            "subclass of open_instruct.verifiers.verifier.Verifier with a name and a score method"
        )
    try:
        return named()
    except Exception as error:
        raise InputError(f"{origin} cannot be made without arguments ({type(error).__name__}: {error})") from error
