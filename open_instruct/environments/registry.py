"""Environments by name, those of users' own, and the tools of a run."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.rollout_sections import TOOL_SET, EnvironmentSection
from open_instruct.core.episodes import RECORDED
from open_instruct.core.errors import InputError
from open_instruct.core.user_code import load_named
from open_instruct.environments.agents import AgentProgram
from open_instruct.environments.built_in import Calculator, Counter, GuessNumber, Python, Wordle
from open_instruct.environments.environment import Factory
from open_instruct.environments.mcp_tools import McpServer, generic_mcp
from open_instruct.environments.openenv import OpenEnvServer
from open_instruct.environments.recorded import RecordedSessions
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
    RECORDED: RecordedSessions(),
}
# Each takes the settings of --tool_configs, and serves all episodes.
SERVERS: dict[str, Callable[..., Factory]] = {
    "search": Search,
    "generic_mcp": generic_mcp,
    **{name: partial(WebTool, name) for name in SERVICES},
}
# A colon and the place of the environment follow the name.
LOCATED: dict[str, Callable[..., Factory]] = {
    "agent": AgentProgram,
    "mcp": McpServer,
    "openenv": OpenEnvServer,
    "verifiers": Taskset,
}
# They answer whole replies, and are no tools.
WITH_TURNS = (AgentProgram, OpenEnvServer, RecordedSessions, Taskset)


def find_factory(word: str, *, origin: str) -> Factory:
    """Find a factory that is not built in: `FILE.py:factory`, `module:factory`, or a server's.

    Raises:
        InputError: there is none of that name, it cannot be imported, or it cannot be called.
    """
    prefix, _, where = word.partition(":")
    if prefix in LOCATED:
        return LOCATED[prefix](where, origin=origin)
    if ":" not in word:
        names = BUILT_IN | SERVERS
        hint = suggest_nearest(word, names) or ";"
        raise InputError(
            f"{origin}: there is no environment of that name{hint} known "
            f"are {', '.join(sorted(names))}, mcp:SERVER, openenv:URL, verifiers:NAME, "
            "agent:COMMAND, agent:FILE.py:function, and "
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
    """All environments that rows may name: built-in ones, `--environment`, and `--tools` as one.

    Raises:
        InputError: see `find_factory`; or the flags of the tools do not go together.
    """
    factories = dict(BUILT_IN)
    factories |= {name: make() for name, make in SERVERS.items()}
    factories["search"] = Search(flags.search_corpus)
    word = flags.environment
    if word is not None and word not in factories:
        factories[word] = find_factory(word, origin=f"--environment {word}")
    if not flags.tools:
        return factories
    if word is not None:
        raise InputError(
            f"--environment {word}: --tools names tools too; put {word} among --tools, or leave "
            "them out",
            kind="conflict",
        )
    names = flags.tool_call_names or flags.tools
    settings = flags.tool_configs or ["{}"] * len(flags.tools)
    for flag, words in (("--tool_call_names", names), ("--tool_configs", settings)):
        if len(words) != len(flags.tools):
            raise InputError(
                f"{flag} has {len(words)} words for {len(flags.tools)} --tools: give one for each",
                kind="bad_value",
            )
    # Several servers of this kind may be named, as their tools have other names.
    if any(names.count(name) > 1 for name in names if name != "generic_mcp"):
        raise InputError(
            f"two of --tools are called the same ({', '.join(names)}): leave one out, or rename it",
            kind="bad_value",
        )
    parts: list[tuple[str, Factory]] = []
    for word, name, text in zip(flags.tools, names, settings, strict=True):
        new_name = "" if name == word else name
        parts.append((new_name, _make_tool_factory(word, text, factories, flags)))
    return factories | {TOOL_SET: ToolSet(parts)}


def _make_tool_factory(
    word: str,
    text: str,
    factories: Mapping[str, Factory],
    flags: EnvironmentSection,
) -> Factory:
    """Make the factory of one of --tools, with its settings.

    Args:
        word: its name.
        text: the settings, as a JSON object.

    Raises:
        InputError: it is a game, or the settings are not its own.
    """
    factory = factories.get(word)
    if factory is None:
        factory = find_factory(word, origin=f"--tools {word}")
    if isinstance(factory, WITH_TURNS) or hasattr(factory, "step"):
        raise InputError(
            f"--tools {word} has turns of its own: name it by --environment", kind="bad_value"
        )
    try:
        settings = json.loads(text)
        if word in SERVERS:
            if word == "search":
                settings = {"corpus": flags.search_corpus, **settings}
            return SERVERS[word](**settings)
        inspect.signature(factory).bind_partial(**settings)
        if not settings:
            return factory
        return partial(factory, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"--tool_configs {text}, of {word}: is no JSON object of its settings: {error}",
            kind="bad_value",
        ) from error
