"""An environment answers a policy turn by turn. One object serves one episode and is not used
again.

A verifier judges what an episode has come to; an environment takes part in it. Plain Python objects
become environments too: classes whose methods are tools, and games with `reset` and `step`. Their
methods may be `async`. One that is not runs in a thread of its own, so it may take its time, and
hang (foreign_calls.py).
"""

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypedDict

from open_instruct.core.errors import InputError
from open_instruct.core.user_code import taken
from open_instruct.environments.argument_types import read_arguments
from open_instruct.environments.foreign_calls import EnvironmentFault as EnvironmentFault
from open_instruct.environments.foreign_calls import call_foreign, describe_error

# Methods of a class of tools that are none themselves.
NOT_TOOLS = ("reset", "close", "reward")

Factory = Callable[..., Any]
"""Makes the environment of an episode, or an object that becomes one, from those columns of a row
that it takes.
"""


class ChatMessage(TypedDict):
    """A turn that is not the policy's: `{"role": "tool", "content": "5"}`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool that a reply calls.

    Example: `ToolCall(name="calculate", arguments={"expression": "2 + 3"})`.
    """

    name: str
    arguments: Mapping[str, Any]
    are_texts: bool = False
    """Whether the form of the call has no types, so that its arguments are still texts; see
    argument_types.py.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A turn of the policy.

    Example: `Reply(text='<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    calls=(ToolCall( name="add", arguments={"a": 2, "b": 3}),))`.
    """

    text: str  # without the token that ends the turn
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How an episode begins.

    Example: `Opening(tools=({"type": "function", "function": {"name": "add", …}},))` begins with
    the row's turns.
    """

    messages: Sequence[ChatMessage] | None = None  # None: those of the row
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, in OpenAI's form


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment answers, with its rewards by name (`--reward_aggregator` says which turns
    count).

    Example: `Turn(messages=({"role": "user", "content": "higher"},))`, then `Turn(done=True,
    rewards={"guess": 1.0})`.
    """

    messages: Sequence[ChatMessage] = ()
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a tool may return in place of text, to reward the call or to end the episode.

    Example: `ToolAnswer(content="Correct!", reward=1.0, done=True)`.
    """

    content: str
    reward: float | None = None
    done: bool = False


class DedicatedLoop(NamedTuple):
    """An event loop in which the environments of one source run, apart from all others.

    Example: `DedicatedLoop(name="taskset wordle", package="verifiers")`.
    """

    name: str  # of the loop and of its thread, as `lasting_loop` has it
    package: str  # calls what the author of an environment wrote, and is not at fault itself


class Source(ABC):
    """A factory of environments that is made ready when a run begins: it has a key to find, or a
    server.

    Attributes:
        dedicated_loop: where its environments run, if that is not the loop that all others share.
    """

    dedicated_loop: DedicatedLoop | None = None

    @abstractmethod
    def begin_run(self) -> None:
        """Called once, if the environment answers one of the prompts, before the first episode.

        Raises:
            InputError: it cannot be had.
        """


class ToolServer(Source):
    """Tools without a memory of an episode, so that one object answers the calls of all.

    Attributes:
        schemas: of the tools, in OpenAI's form; known when the run has begun.
    """

    schemas: Sequence[Mapping[str, Any]]

    @abstractmethod
    async def call(self, name: str, /, **arguments: Any) -> str:
        """What a tool answers, as a method of a toolbox does."""

    def __call__(self) -> "ToolServer":
        return self


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def text_tool(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    """The schema of a tool whose one argument is a text."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
    }
    return tool_schema(name, description, {**parameters, "required": [argument]})


def begin_run(factory: Factory) -> None:
    """Make a factory of ours ready; see `Source`."""
    if isinstance(factory, Source):
        factory.begin_run()


def find_dedicated_loop(factory: Factory) -> DedicatedLoop | None:
    """The event loop of its own that a factory's environments run in; None if they share one."""
    if isinstance(factory, Source):
        return factory.dedicated_loop
    return None


class Environment(Protocol):
    """`start`, then `step` for each reply until a turn is `done`, then `close`, which is called on
    every path.

    An exception of `start` or `step` ends the episode with the status `env_error`.
    """

    async def start(self) -> Opening: ...

    async def step(self, reply: Reply) -> Turn: ...

    async def close(self) -> None: ...


def make_environment(factory: Factory, row: Mapping[str, Any]) -> Environment:
    """The environment of one episode: the factory is called with the columns of the row that it
    takes.

    Raises:
        TypeError: it makes none of the three kinds.
    """
    made = factory(**taken(factory, row))
    if callable(getattr(made, "start", None)) and callable(getattr(made, "step", None)):
        return UserEnvironment(made)
    if callable(getattr(made, "step", None)) and callable(getattr(made, "reset", None)):
        return Game([made], {}, row)
    if tools := find_tools(made):
        return Toolbox([made], tools, row)
    raise TypeError(
        f"{type(made).__name__} is no environment: it has neither `start` and `step`, nor `reset` "
        "and `step`, nor public methods that are tools"
    )


class UserEnvironment:
    """A user's whole environment, whose methods run apart from the episodes' event loop."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def start(self) -> Opening:
        opening: Opening = await call_foreign(self._environment.start)
        return opening

    async def step(self, reply: Reply) -> Turn:
        turn: Turn = await call_foreign(self._environment.step, reply)
        return turn

    async def close(self) -> None:
        await call_foreign(self._environment.close)


class Tool(NamedTuple):
    """A function that a reply may call; its schema, if there is none, is read off its types and its
    docstring.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any] | None = None


def find_tools(toolbox: Any) -> dict[str, Tool]:
    """The tools of a server, or the public methods of another object, by name."""
    if isinstance(toolbox, ToolServer):
        named = {each["function"]["name"]: each for each in toolbox.schemas}
        return {name: Tool(partial(toolbox.call, name), schema) for name, schema in named.items()}
    return {name: Tool(method) for name, method in _public_methods(toolbox)}


def check_tools(factory: Factory, *, origin: str) -> None:
    """See that the methods of a class of tools can be described to a policy, before anything is
    started.

    Raises:
        InputError: names the method that has no docstring, or an argument without a type or a
            description.
    """
    from transformers.utils import get_json_schema

    if not inspect.isclass(factory) or hasattr(factory, "step"):
        return
    for name, method in _public_methods(factory):
        takes_self = inspect.isfunction(inspect.getattr_static(factory, name))
        try:
            get_json_schema(method.__get__(object()) if takes_self else method)
        except Exception as error:  # of a module of its own
            raise InputError(
                f"{origin}: its tool {name} cannot be described to the policy: {error}",
                kind="own_code",
            ) from error


def _public_methods(owner: Any) -> list[tuple[str, Any]]:
    methods = inspect.getmembers(owner, callable)
    return [
        (name, method)
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


class Toolbox:
    """Objects whose public methods are tools that a reply may call; a reply without a call ends the
    episode.

    A tool returns text, anything that JSON can hold, or a `ToolAnswer`; what it raises is its
    answer to the policy, but for an `EnvironmentFault`. As far as an object has them,
    `reset(**row)` is called at the start with the columns of the row that it takes, and may return
    a text for the first prompt; `reward()` is called when the policy has ended the episode, and
    `close()` last. Where the row names `tools`, the policy has those alone.

    Raises:
        ValueError: none of those is there.
    """

    def __init__(
        self, objects: Sequence[Any], tools: Mapping[str, Tool], row: Mapping[str, Any]
    ) -> None:
        self._objects = objects
        self._tools = {
            name: tool
            for name, tool in tools.items()
            if not row.get("tools") or name in row["tools"]
        }
        if tools and not self._tools:
            raise ValueError(
                f"none of the row's tools is there: {row['tools']}; there are {', '.join(tools)}"
            )
        self._row = row
        self._name = type(objects[0]).__name__.lower() if len(objects) == 1 else "tools"

    async def start(self) -> Opening:
        resets = [each.reset for each in self._objects if hasattr(each, "reset")]
        texts = [await call_foreign(reset, **taken(reset, self._row)) for reset in resets]
        if any(
            isinstance(text, tuple) and not (len(text) == 2 and isinstance(text[1], Mapping))
            for text in texts
        ):
            raise TypeError(
                "`reset` returned a tuple: let it return one text, or as gymnasium's a text and "
                "a dict"
            )
        # A game's comes with a dict.
        texts = [text[0] if isinstance(text, tuple) else text for text in texts]
        schemas = [self._schema(name, tool) for name, tool in self._tools.items()]
        said = "\n\n".join(str(text) for text in texts if text)
        if not said:
            return Opening(tools=schemas)
        *before, last = self._row["messages"]
        asked = ChatMessage(role=last["role"], content=f"{last['content']}\n\n{said}".strip())
        return Opening(messages=[*before, asked], tools=schemas)

    def _schema(self, name: str, tool: Tool) -> dict[str, Any]:
        """The JSON schema of a tool, in OpenAI's form."""
        from transformers.utils import get_json_schema  # only now: transformers is slow to import

        schema = tool.schema or get_json_schema(tool.function)
        return {**schema, "function": {**schema["function"], "name": name}}

    async def step(self, reply: Reply) -> Turn:
        answers: list[ToolAnswer] = []
        for call in reply.calls:
            arguments = call.arguments
            if call.are_texts:
                schema = self._schema(call.name, self._tools[call.name])
                arguments = read_arguments(arguments, [schema], call.name)
            answers.append(await self._answer(call.name, arguments))
            # The episode has ended, and is not rewarded for what the reply calls further.
            if answers[-1].done:
                break
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        if not reply.calls:
            rewards = [
                await call_foreign(each.reward) for each in self._objects if hasattr(each, "reward")
            ]
        return Turn(
            messages=[{"role": "tool", "content": answer.content} for answer in answers],
            done=not answers or answers[-1].done,
            rewards={self._name: sum(rewards)} if rewards else {},
        )

    async def close(self) -> None:
        closing = [call_foreign(each.close) for each in self._objects if hasattr(each, "close")]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        try:
            answer = await call_foreign(self._tools[name].function, **arguments)
        except EnvironmentFault:
            raise
        except Exception as error:  # a tool is given whatever the policy has written
            answer = describe_error(error)
        if isinstance(answer, ToolAnswer):
            return answer
        if not isinstance(answer, str):  # in a thread, as it may be long
            answer = await call_foreign(json.dumps, answer, default=str)
        return ToolAnswer(content=answer)


class ToolSet(Source):
    """Makes environments whose tools are those of several others.

    Args:
        parts: the factories of the others, each with the name that its one tool is called by; ""
            leaves it its own.
    """

    def __init__(self, parts: Sequence[tuple[str, Factory]]) -> None:
        self._parts = parts

    def begin_run(self) -> None:
        for _, factory in self._parts:
            begin_run(factory)

    def __call__(self, **row: Any) -> Toolbox:
        """:raises TypeError: one of them is more than tools, or has a tool of the same name as
        another.
        """
        objects: list[Any] = []
        tools: dict[str, Tool] = {}
        for name, factory in self._parts:
            objects.append(made := factory(**taken(factory, row)))
            own = find_tools(made)
            own = {name: next(iter(own.values()))} if name and len(own) == 1 else own
            if hasattr(made, "step") or own.keys() & tools.keys():
                why = (
                    "has turns of its own"
                    if hasattr(made, "step")
                    else "has a tool of the same name as another"
                )
                raise TypeError(
                    f"{type(made).__name__} {why}: name it by --environment, not by --tools"
                )
            tools |= own
        return Toolbox(objects, tools, row)


class Game(Toolbox):
    """An object with gymnasium's `reset` and `step`, whose observations and actions are texts.

    `reset()` returns an observation, or an observation and a dict; it is called with the columns of
    the row that it takes. `step(text)` returns an observation, a reward, and whether the game is
    over: in gymnasium's form, with terminated, truncated and a dict, or in the older one, with done
    and a dict.
    """

    async def step(self, reply: Reply) -> Turn:
        observation, reward, *ends = await call_foreign(self._objects[0].step, reply.text)
        done = any(end for end in ends if not isinstance(end, Mapping))
        messages: list[ChatMessage] = [{"role": "user", "content": str(observation)}]
        return Turn(messages=messages, done=done, rewards={self._name: reward})
