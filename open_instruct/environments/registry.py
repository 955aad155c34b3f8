"""Environments by name, those of users' own, and the tools of a run."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.rollout_sections import TOOL_SET, EnvironmentSection
from open_instruct.core.errors import InputError
from open_instruct.core.user_code import load_named
from open_instruct.environments.built_in import Calculator, Counter, GuessNumber, Python, Wordle
from open_instruct.environments.environment import Factory
from open_instruct.environments.mcp_tools import McpServer, generic_mcp
from open_instruct.environments.openenv import OpenEnvServer
from open_instruct.environments.search import Search
from open_instruct.environments.taskset import Taskset
from open_instruct.environments.toolbox import ToolSet, check_tools
from open_instruct.environments.web_tools import SERVICES, WebTool

BUILT_IN: dict[str, Factory] = {
    "calculator": Calculator,
    "python": Python,
    "counter": Counter,
    "guess_number": GuessNumber,
    "wordle": Wordle,
}
# Each is made by the settings of --tool_configs, and serves all episodes.
SERVERS: dict[str, Callable[..., Factory]] = {
    "search": Search,
    "generic_mcp": generic_mcp,
    **{name: partial(WebTool, name) for name in SERVICES},
}
# What follows the name and a colon says where it is.
AT: dict[str, Callable[..., Factory]] = {
    "mcp": McpServer,
    "openenv": OpenEnvServer,
    "verifiers": Taskset,
}


def find_factory(word: str, *, origin: str) -> Factory:
    """The factory that `word` names, which is none of ours: `FILE.py:factory`, `module:factory`, or
    a server's.

    Raises:
        InputError: there is none of that name, it cannot be imported, or it cannot be called.
    """
    prefix, _, where = word.partition(":")
    if prefix in AT:
        return AT[prefix](where, origin=origin)
    if ":" not in word:
        known = BUILT_IN | SERVERS
        hint = suggest_nearest(word, known) or ";"
        raise InputError(
            f"{origin}: there is no environment of that name{hint} known "
            f"are {', '.join(sorted(known))}, mcp:SERVER, openenv:URL, verifiers:NAME, and "
            "FILE.py:factory or module:factory of your own",
            kind="bad_value",
        )
    factory: Factory = load_named(word, origin=origin, what="factory")
    if not callable(factory):
        raise InputError(
            f"{origin} is a {type(factory).__name__}, and neither a class nor a function",
            kind="own_code",
        )
    check_tools(factory, origin=origin)
    return factory


def known_environments(flags: EnvironmentSection) -> dict[str, Factory]:
    """All that rows may name: those that are built in, that of `--environment`, and the tools of
    `--tools` as one.

    Raises:
        InputError: see `find_factory`; or the flags of the tools do not go together.
    """
    known = (
        BUILT_IN
        | {name: make() for name, make in SERVERS.items()}
        | {"search": Search(flags.search_corpus)}
    )
    if (own := flags.environment) is not None and own not in known:
        known[own] = find_factory(own, origin=f"--environment {own}")
    if not flags.tools:
        return known
    if own is not None:
        raise InputError(
            (
                f"--environment {own}: --tools names tools too; put {own} among --tools, or "
                "leave them out"
            ),
            kind="conflict",
        )
    names = flags.tool_call_names or flags.tools
    settings = flags.tool_configs or ["{}"] * len(flags.tools)
    for flag, words in (("--tool_call_names", names), ("--tool_configs", settings)):
        if len(words) != len(flags.tools):
            raise InputError(
                (
                    f"{flag} has {len(words)} words for {len(flags.tools)} --tools: give one for "
                    "each"
                ),
                kind="bad_value",
            )
    # Whose tools have names of their own.
    if any(names.count(name) > 1 for name in names if name != "generic_mcp"):
        raise InputError(
            (
                f"two of --tools are called the same ({', '.join(names)}): leave one out, or "
                "rename it"
            ),
            kind="bad_value",
        )
    parts = [
        ("" if name == word else name, _tool(word, text, known, flags))
        for word, name, text in zip(flags.tools, names, settings, strict=True)
    ]
    return known | {TOOL_SET: ToolSet(parts)}


def _tool(word: str, text: str, known: Mapping[str, Factory], flags: EnvironmentSection) -> Factory:
    """The factory of one of --tools, with the settings that `text` has as a JSON object.

    Raises:
        InputError: it is a game, or the settings are not its own.
    """
    factory = known[word] if word in known else find_factory(word, origin=f"--tools {word}")
    if isinstance(factory, OpenEnvServer | Taskset) or hasattr(factory, "step"):
        raise InputError(
            f"--tools {word} has turns of its own: name it by --environment", kind="bad_value"
        )
    try:
        settings = json.loads(text)
        if word in SERVERS:
            of_flags = {"corpus": flags.search_corpus} if word == "search" else {}
            return SERVERS[word](**{**of_flags, **settings})
        inspect.signature(factory).bind_partial(**settings)
        return partial(factory, **settings) if settings else factory
    except (TypeError, ValueError) as error:
        raise InputError(
            f"--tool_configs {text}, of {word}: is no JSON object of its settings: {error}",
            kind="bad_value",
        ) from error
