"""Find verifiers: the built-in ones, those of installed packages, and those of `--verifier`."""

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

# One judge for each prompt that has a name.
NAMED_JUDGES = [
    type("NamedJudge", (Judge,), {"name": name}) for name in JUDGE_PROMPTS if name != Rubric.name
]
JUDGES: list[type[Verifier]] = [Judge, Rubric, *NAMED_JUDGES]
BUILT_IN: list[type[Verifier]] = [*answers.ALL, *JUDGES, IFEval, IFEvalOld, Code, CodeStdio]
ENTRY_POINT_GROUP = "open_instruct.rewards"
SCORE_METHODS = ("score", "judge", "judge_all")  # of which a verifier has one of its own


def known_verifiers(flags: RewardSection) -> dict[str, Verifier]:
    """All verifiers by name, each configured by `flags`, with those that `--verifier` adds.

    A word is the name of a verifier, `FILE.py:NAME` or `module:NAME` of a class or a function, or
    `reward_model:FOLDER` or `prm:FOLDER` with the exported model of a run.

    Raises:
        InputError: a word cannot be imported, is not a `Verifier`, or has the name of another; a
            folder has no such model; or a verifier cannot do what the flags ask of it.
    """
    verifiers = {kind.name: kind() for kind in BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        origin = f"the entry point {point.name} = {point.value}"
        _register(verifiers, _load_verifier(point.value, origin), origin)
    for word in flags.verifier:
        name, colon, settings = word.partition(":")
        if name in MODEL_VERIFIERS and name not in verifiers:
            verifiers[name] = MODEL_VERIFIERS[name](settings)
        elif colon:
            origin = f"--verifier {word}"
            _register(verifiers, _load_verifier(word, origin), origin)
    for word in flags.verifier:
        if ":" not in word and word not in verifiers:
            raise InputError(
                f"--verifier {word}: there is no verifier of that "
                f"name{suggest_nearest(word, verifiers) or ';'} known are "
                f"{', '.join(sorted(verifiers))}, and FILE.py:NAME or module:NAME of your own",
                kind="bad_value",
            )
    for verifier in verifiers.values():
        verifier.configure(flags)
    return verifiers


def list_judges(words: Sequence[str]) -> list[str]:
    """The names of the verifiers that judge rows which name none: those of `--verifier`'s words."""
    names = []
    for word in words:
        name, colon, _ = word.partition(":")
        if colon and name not in MODEL_VERIFIERS:
            name = _load_verifier(word, f"--verifier {word}").name
        names.append(name)
    return names


def _register(verifiers: dict[str, Verifier], verifier: Verifier, origin: str) -> None:
    if verifier.name in verifiers:
        raise InputError(
            f"{origin} is called {verifier.name!r}, as another verifier is; give it a name of its "
            "own",
            kind="own_code",
        )
    verifiers[verifier.name] = verifier


def _load_verifier(word: str, origin: str) -> Verifier:
    """The verifier of a class or a function that somebody else has written.

    Args:
        word: `FILE.py:NAME` or `module:NAME`.
        origin: who names it, for messages.
    """
    value = load_named(word, origin=origin, what="NAME")
    if inspect.isfunction(value):
        return RewardFunction(value)
    if not _is_verifier_class(value):
        raise InputError(
            f"{origin} is neither a function nor a verifier; write `def reward(completions, "
            "**columns)`, or make it a subclass of open_instruct.rewards.verifier.Verifier with "
            "a name and a score method",
            kind="own_code",
        )
    try:
        return value()
    except Exception as error:
        raise InputError(
            f"{origin} cannot be made without arguments ({type(error).__name__}: {error})",
            kind="own_code",
        ) from error


def _is_verifier_class(value: object) -> bool:
    """Whether a value is a verifier's class, with a name and a method of its own that scores."""
    if not isinstance(value, type) or not issubclass(value, Verifier):
        return False
    if not isinstance(getattr(value, "name", None), str):
        return False
    return any(getattr(value, name) is not getattr(Verifier, name) for name in SCORE_METHODS)
