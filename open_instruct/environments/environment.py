"""An environment answers a policy turn by turn. One object serves one episode and is not used again.

A verifier judges what an episode has come to; an environment takes part in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

Factory = Callable[..., Any]
"""Makes the environment of an episode, or an object that becomes one, from those columns of a row that it takes."""


class ChatMessage(TypedDict):
    """A turn that is not the policy's: `{"role": "tool", "content": "5"}`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool that a reply calls. Example: `ToolCall(name="calculate", arguments={"expression": "2 + 3"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A turn of the policy.

    Example: `Reply(text='<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', calls=(ToolCall(
    name="add", arguments={"a": 2, "b": 3}),))`.
    """

    text: str  # without the token that ends the turn
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How an episode begins.

    Example: `Opening(tools=({"type": "function", "function": {"name": "add", …}},))` begins with the row's turns.
    """

    messages: Sequence[ChatMessage] | None = None  # None: those of the row
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, in OpenAI's form


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment answers, with its rewards by name (`--reward_aggregator` says which turns count).

    Example: `Turn(messages=({"role": "user", "content": "higher"},))`, then `Turn(done=True, rewards={"guess": 1.0})`.
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


class EnvironmentFault(Exception):
    """What a tool raises where the policy is not at fault: the episode ends as `env_error`, with this as the reason.

    Example: `raise EnvironmentFault("the search server answers 503")`.
    """


class Source(ABC):
    """A factory of environments that is made ready when a run begins: it has a key to find, or a server."""

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


def schema_of(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_tool(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    """The schema of a tool whose one argument is a text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string", "description": meaning}}}
    return schema_of(name, description, {**parameters, "required": [argument]})


def begin_run(factory: Factory) -> None:
    """Make a factory of ours ready; see `Source`."""
    if isinstance(factory, Source):
        factory.begin_run()


class Environment(Protocol):
    """`start`, then `step` for each reply until a turn is `done`, then `close`, which is called on every path.

    An exception of `start` or `step` ends the episode with the status `env_error`.
    """

    async def start(self) -> Opening: ...

    async def step(self, reply: Reply) -> Turn: ...

    async def close(self) -> None: ...
