"""Plain Python objects become environments: classes whose methods are tools, and games with `reset` and `step`.

Their methods may be `async`. One that is not runs in a thread of its own, so it may take its time, and hang.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from open_instruct.environments.environment import (
    ChatMessage,
    Environment,
    EnvironmentFault,
    Factory,
    Opening,
    Reply,
    ToolAnswer,
    ToolServer,
    Turn,
)
from open_instruct.users_code import taken

# Methods of a class of tools that are none themselves.
NOT_TOOLS = ("reset", "close", "reward")


def make_environment(factory: Factory, row: Mapping[str, Any]) -> Environment:
    """The environment of one episode: the factory is called with the columns of the row that it takes."""
    return as_environment(factory(**taken(factory, row)), row)


def as_environment(made: Any, row: Mapping[str, Any]) -> Environment:
    """The environment that a factory has made for a row, whichever of the three kinds it is.

    Raises:
        TypeError: it is none of them.
    """
    if callable(getattr(made, "start", None)) and callable(getattr(made, "step", None)):
        environment: Environment = made
        return environment
    if callable(getattr(made, "step", None)) and callable(getattr(made, "reset", None)):
        return Game(made, row)
    if tools := tools_of(made):
        return Toolbox([made], tools, row)
    raise TypeError(
        f"{type(made).__name__} is no environment: it has neither `start` and `step`, nor `reset` and `step`, nor "
        "public methods that are tools"
    )


class Tool(NamedTuple):
    """A function that a reply may call; its schema, if there is none, is read off its types and its docstring."""

    function: Callable[..., Any]
    schema: Mapping[str, Any] | None = None


def tools_of(toolbox: Any) -> dict[str, Tool]:
    """The tools of a server, or the public methods of another object, by name."""
    if isinstance(toolbox, ToolServer):
        named = {each["function"]["name"]: each for each in toolbox.schemas}
        return {name: Tool(partial(toolbox.call, name), schema) for name, schema in named.items()}
    methods = inspect.getmembers(toolbox, callable)
    return {name: Tool(method) for name, method in methods if not name.startswith("_") and name not in NOT_TOOLS}


class Toolbox:
    """Objects whose public methods are tools that a reply may call; a reply without a call ends the episode.

    A tool returns text, anything that JSON can hold, or a `ToolAnswer`; what it raises is its answer to the policy, but
    for an `EnvironmentFault`. As far as an object has them, `reset(**row)` is called at the start with the columns of
    the row that it takes, and may return a text for the first prompt; `reward()` is called when the policy has ended
    the episode, and `close()` last. Where the row names `tools`, the policy has those alone.

    Raises:
        ValueError: none of those is there.
    """

    def __init__(self, objects: Sequence[Any], tools: Mapping[str, Tool], row: Mapping[str, Any]) -> None:
        self._objects = objects
        self._tools = {name: tool for name, tool in tools.items() if not row.get("tools") or name in row["tools"]}
        if not self._tools:
            raise ValueError(f"none of the row's tools is there: {row['tools']}; there are {', '.join(tools)}")
        self._row = row
        self._name = type(objects[0]).__name__.lower() if len(objects) == 1 else "tools"

    async def start(self) -> Opening:
        from transformers.utils import get_json_schema  # only now: transformers is slow to import

        resets = [each.reset for each in self._objects if hasattr(each, "reset")]
        texts = [await called(reset, **taken(reset, self._row)) for reset in resets]
        schemas = []
        for name, tool in self._tools.items():
            schema = tool.schema or get_json_schema(tool.function)
            schemas.append({**schema, "function": {**schema["function"], "name": name}})
        said = "\n\n".join(str(text) for text in texts if text)
        return Opening(messages=with_text(self._row["messages"], said), tools=schemas)

    async def step(self, reply: Reply) -> Turn:
        answers: list[ToolAnswer] = []
        for call in reply.calls:
            answers.append(await self._answer(call.name, call.arguments))
            if answers[-1].done:  # the episode has ended, and is not rewarded for what the reply calls further
                break
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        if not reply.calls:
            rewards = [float(await called(each.reward)) for each in self._objects if hasattr(each, "reward")]
        return Turn(
            messages=[{"role": "tool", "content": answer.content} for answer in answers],
            done=not answers or answers[-1].done,
            rewards={self._name: sum(rewards)} if rewards else {},
        )

    async def close(self) -> None:
        closing = [called(each.close) for each in self._objects if hasattr(each, "close")]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        try:
            answer = await called(self._tools[name].function, **arguments)
        except EnvironmentFault:
            raise
        except Exception as error:  # a tool is given whatever the policy has written
            answer = f"{type(error).__name__}: {error}"
        if isinstance(answer, ToolAnswer):
            return answer
        return ToolAnswer(content=answer if isinstance(answer, str) else json.dumps(answer, default=str))


class Game:
    """An object with gymnasium's `reset` and `step`, whose observations and actions are texts.

    `reset()` returns an observation, or an observation and a dict; it is called with the columns of the row that it
    takes. `step(text)` returns an observation, a reward, and whether the game is over: in gymnasium's form, with
    terminated, truncated and a dict, or in the older one, with done and a dict.
    """

    def __init__(self, game: Any, row: Mapping[str, Any]) -> None:
        self._game = game
        self._row = row

    async def start(self) -> Opening:
        observation = await called(self._game.reset, **taken(self._game.reset, self._row))
        if isinstance(observation, tuple):
            observation = observation[0]
        return Opening(messages=with_text(self._row["messages"], observation))

    async def step(self, reply: Reply) -> Turn:
        observation, reward, *ends = await called(self._game.step, reply.text)
        done = any(end for end in ends if not isinstance(end, Mapping))
        rewards = {type(self._game).__name__.lower(): float(reward)}
        return Turn(messages=[{"role": "user", "content": str(observation)}], done=done, rewards=rewards)

    async def close(self) -> None:
        if close := getattr(self._game, "close", None):
            await called(close)


def with_text(messages: Sequence[ChatMessage], text: Any) -> list[ChatMessage] | None:
    """The turns of a row with a text behind the last one; None where there is no text."""
    if not text:
        return None
    *before, last = messages
    return [*before, {"role": last["role"], "content": f"{last['content']}\n\n{text}".strip()}]


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function, awaited where it is a coroutine's, else computed in a thread.

    The thread is a new one each time, and nobody waits for it: a function that hangs holds up none but its episode.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # exit() and the like must not leave the episode waiting
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name=f"environment-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await asyncio.wrap_future(future)
