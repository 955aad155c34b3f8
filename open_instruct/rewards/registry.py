"""Every verifier there is: ours, those of installed packages, and those named by `--verifier`."""

import inspect
from collections.abc import Sequence
from importlib.metadata import entry_points

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.user_code import load_named
from open_instruct.rewards import answers
from open_instruct.rewards.code import Code, CodeStdio
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.ifeval import IFEval, IFEvalOld
from open_instruct.rewards.judge import JUDGE_PROMPTS, Judge, Rubric
from open_instruct.rewards.reward_models import MODEL_VERIFIERS
from open_instruct.rewards.verifier import Verifier

GENERAL = [
    type("General", (Judge,), {"name": name}) for name in JUDGE_PROMPTS if name != Rubric.name
]
JUDGES: list[type[Verifier]] = [Judge, Rubric, *GENERAL]
BUILT_IN: list[type[Verifier]] = [*answers.ALL, *JUDGES, IFEval, IFEvalOld, Code, CodeStdio]
ENTRY_POINT_GROUP = "open_instruct.rewards"
WAYS_TO_SCORE = ("score", "judge", "judge_all")  # of which a verifier has one of its own


def known_verifiers(flags: RewardSection) -> dict[str, Verifier]:
    """All verifiers by name, with those that the words of `--verifier` add, each configured by
    `flags`.

    A word is the name of a verifier, `FILE.py:NAME` or `module:NAME` of a class or a function, or
    `reward_model:FOLDER` or `prm:FOLDER` with the exported model of a run.

    Raises:
        InputError: a word cannot be imported, is not a `Verifier`, or has the name of another; a
            folder has no such model; or a verifier cannot do what the flags ask of it.
    """
    verifiers = {kind.name: kind() for kind in BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        _add(verifiers, f"the entry point {point.name} = {point.value}", point.value)
    for word in flags.verifier:
        name, colon, settings = word.partition(":")
        if name in MODEL_VERIFIERS and name not in verifiers:
            verifiers[name] = MODEL_VERIFIERS[name](settings)
        elif colon:
            _add(verifiers, f"--verifier {word}", word)
    if unknown := [word for word in flags.verifier if ":" not in word and word not in verifiers]:
        raise InputError(
            f"--verifier {unknown[0]}: there is no verifier of that "
            f"name{suggest_nearest(unknown[0], verifiers) or ';'} known are "
            f"{', '.join(sorted(verifiers))}, and FILE.py:NAME or module:NAME of your own",
            kind="bad_value",
        )
    for verifier in verifiers.values():
        verifier.configure(flags)
    return verifiers


def judges_named(user: Sequence[str]) -> list[str]:
    """The names of the verifiers that the words of `--verifier` stand for: they judge rows that
    name no verifier.
    """
    names = []
    for word in user:
        name, colon, _ = word.partition(":")
        is_own = colon and name not in MODEL_VERIFIERS
        names.append(_own(word, f"--verifier {word}").name if is_own else name)
    return names


def _add(verifiers: dict[str, Verifier], origin: str, word: str) -> None:
    verifier = _own(word, origin)
    if verifier.name in verifiers:
        raise InputError(
            (
                f"{origin} is called {verifier.name!r}, as another verifier is; give it a name "
                "of its own"
            ),
            kind="own_code",
        )
    verifiers[verifier.name] = verifier


def _own(word: str, origin: str) -> Verifier:
    """The verifier of a class or a function that somebody else has written."""
    named = load_named(word, origin=origin, what="NAME")
    if inspect.isfunction(named):
        return RewardFunction(named)
    is_kind = (
        isinstance(named, type)
        and issubclass(named, Verifier)
        and isinstance(getattr(named, "name", None), str)
    )
    if not is_kind or all(getattr(named, way) is getattr(Verifier, way) for way in WAYS_TO_SCORE):
        raise InputError(
            f"{origin} is neither a function nor a verifier; write `def reward(completions, "
            "**columns)`, or make it a subclass of open_instruct.rewards.verifier.Verifier with "
            "a name and a score method",
            kind="own_code",
        )
    try:
        return named()
    except Exception as error:
        raise InputError(
            f"{origin} cannot be made without arguments ({type(error).__name__}: {error})",
            kind="own_code",
        ) from error
