"""What an environment is: the protocol, and the records that it exchanges with an episode.

An environment answers a policy turn by turn; one object serves one episode. It is not a verifier,
which judges a finished episode and takes no part in it. Plain Python objects become environments
too (adapters.py, toolbox.py). Their methods may be `async`; one that is not runs in a thread of its
own, so it may take long, or hang (foreign_calls.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict

from open_instruct.environments.foreign_calls import EnvironmentFault as EnvironmentFault

Factory = Callable[..., Any]
"""Makes an environment, or an object that becomes one, from the columns of a row that it takes."""


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
    """Whether the arguments are still texts, in a form without types (argument_types.py)."""


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
    """An environment's answer, with its rewards by name.

    `--reward_aggregator` says which turns' rewards count.

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

    name: str  # of the loop and of its thread, as `start_loop` has it
    package: str  # calls what the author of an environment wrote, and is not at fault itself


class Source(ABC):
    """A factory of environments that a run makes ready: it has a key to find, or a server.

    Attributes:
        dedicated_loop: the event loop of its environments; None where they share one.
    """

    dedicated_loop: DedicatedLoop | None = None

    @abstractmethod
    def begin_run(self) -> None:
        """Prepare the first episode; called once, if the environment answers one of the prompts.

        Raises:
            InputError: it is not available.
        """


class ToolServer(Source):
    """Tools that remember nothing of an episode: one object answers the calls of all.

    Attributes:
        schemas: of the tools, in OpenAI's form; known when the run has begun.
    """

    schemas: Sequence[Mapping[str, Any]]

    @abstractmethod
    async def call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool and return its answer, as a method of a toolbox does."""

    def __call__(self) -> "ToolServer":
        return self


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": parameters,
        },
    }


def text_tool(
    name: str,
    description: str,
    argument: str,
    meaning: str,
) -> dict[str, Any]:
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
    """The event loop that only this factory's environments run in; None if they share one."""
    if isinstance(factory, Source):
        return factory.dedicated_loop
    return None


class Environment(Protocol):
    """`start`, then `step` for each reply until a turn is `done`, then `close` on every path.

    An exception of `start` or `step` ends the episode with the status `env_error`.
    """

    async def start(self) -> Opening: ...

    async def step(self, reply: Reply) -> Turn: ...

    async def close(self) -> None: ...
