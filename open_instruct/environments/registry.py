"""Environments by name, and those of users' own."""

from collections.abc import Callable, Mapping
from typing import Any

from open_instruct.config.parser import nearest
from open_instruct.environments.adapters import as_environment, taken
from open_instruct.environments.built_in import Calculator, Counter, GuessNumber, Python, Wordle
from open_instruct.environments.environment import Environment, Source
from open_instruct.environments.mcp_tools import PREFIX, McpServer
from open_instruct.errors import InputError
from open_instruct.users_code import load_named

Factory = Callable[..., Any]
BUILT_IN: dict[str, Factory] = {
    "calculator": Calculator,
    "python": Python,
    "counter": Counter,
    "guess_number": GuessNumber,
    "wordle": Wordle,
}


def factory_named(word: str, *, origin: str) -> Factory:
    """The factory that `word` names: one that is built in, `FILE.py:factory` or `module:factory`, or `mcp:SERVER`.

    Raises:
        InputError: there is none of that name, it cannot be imported, or it cannot be called.
    """
    if word.startswith(PREFIX):
        return McpServer(word.removeprefix(PREFIX), origin=origin)
    if ":" not in word:
        if word in BUILT_IN:
            return BUILT_IN[word]
        raise InputError(
            f"{origin}: there is no environment of that name{nearest(word, BUILT_IN) or ';'} known are "
            f"{', '.join(sorted(BUILT_IN))}, mcp:SERVER, and FILE.py:factory or module:factory of your own"
        )
    factory: Factory = load_named(word, origin=origin, what="factory")
    if not callable(factory):
        raise InputError(f"{origin} is a {type(factory).__name__}, and neither a class nor a function")
    return factory


def known_environments(own: str | None) -> dict[str, Factory]:
    """All that rows may name: those that are built in, and that of `--environment`.

    Raises:
        InputError: see `factory_named`.
    """
    if own is None:
        return BUILT_IN
    return BUILT_IN | {own: factory_named(own, origin=f"--environment {own}")}


def begin_run(factory: Factory) -> None:
    """Make a factory of ours ready; see `Source`."""
    if isinstance(factory, Source):
        factory.begin_run()


def make_environment(factory: Factory, row: Mapping[str, Any]) -> Environment:
    """The environment of one episode: the factory is called with the columns of the row that it takes."""
    return as_environment(factory(**taken(factory, row)), row)
