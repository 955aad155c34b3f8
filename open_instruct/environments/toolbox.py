"""Tools: the public methods of plain Python objects, which a policy's replies may call."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from open_instruct.core.errors import InputError
from open_instruct.core.user_code import accepted_columns
from open_instruct.environments.argument_types import read_arguments
from open_instruct.environments.environment import (
    ChatMessage,
    Factory,
    Opening,
    Reply,
    Source,
    ToolAnswer,
    ToolServer,
    Turn,
    begin_run,
)
from open_instruct.environments.foreign_calls import (
    EnvironmentFault,
    call_foreign,
    describe_error,
)

# Methods of a class of tools that are none themselves.
NOT_TOOLS = ("reset", "close", "reward")


class Tool(NamedTuple):
    """A function that a reply may call.

    Where it has no schema, one is read off its types and its docstring.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any] | None = None


def find_tools(toolbox: Any) -> dict[str, Tool]:
    """The tools of a server, or the public methods of another object, by name."""
    if isinstance(toolbox, ToolServer):
        schemas = {schema["function"]["name"]: schema for schema in toolbox.schemas}
        return {name: Tool(partial(toolbox.call, name), schema) for name, schema in schemas.items()}
    return {name: Tool(method) for name, method in _list_public_methods(toolbox)}


def check_tools(factory: Factory, *, origin: str) -> None:
    """Check that the methods of a class of tools can be described to a policy.

    Raises:
        InputError: names the method that has no docstring, or an argument without a type or a
            description.
    """
    from transformers.utils import get_json_schema

    if not inspect.isclass(factory) or hasattr(factory, "step"):
        return
    for name, method in _list_public_methods(factory):
        takes_self = inspect.isfunction(inspect.getattr_static(factory, name))
        bound_method = method.__get__(object()) if takes_self else method
        try:
            get_json_schema(bound_method)
        except Exception as error:  # of a module of its own
            raise InputError(
                f"{origin}: its tool {name} cannot be described to the policy: {error}",
                kind="own_code",
            ) from error


def _list_public_methods(owner: Any) -> list[tuple[str, Any]]:
    methods = inspect.getmembers(owner, callable)
    return [
        (name, method)
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


class Toolbox:
    """An environment of tools: the public methods of objects; a reply without a call ends it.

    A tool returns text, anything that JSON can hold, or a `ToolAnswer`. An exception is its answer
    to the policy, except an `EnvironmentFault`. Three methods of the objects are no tools, and are
    called where they exist: `reset(**row)` at the start, with the columns of the row that it takes,
    which may return a text for the first prompt; `reward()` when the policy has ended the episode;
    `close()` last. If the row names `tools`, the policy has only those.

    Raises:
        ValueError: none of the row's tools is there.
    """

    def __init__(
        self, objects: Sequence[Any], tools: Mapping[str, Tool], row: Mapping[str, Any]
    ) -> None:
        self._objects = objects
        allowed_names = row.get("tools") or tools.keys()
        self._tools = {name: tool for name, tool in tools.items() if name in allowed_names}
        if tools and not self._tools:
            raise ValueError(
                f"none of the row's tools is there: {row['tools']}; there are {', '.join(tools)}"
            )
        self._row = row
        self._name = type(objects[0]).__name__.lower() if len(objects) == 1 else "tools"

    async def start(self) -> Opening:
        resets = [each.reset for each in self._objects if hasattr(each, "reset")]
        results = [
            await call_foreign(reset, **accepted_columns(reset, self._row)) for reset in resets
        ]
        texts = [_read_reset_text(result) for result in results]
        schemas = [self._schema(name, tool) for name, tool in self._tools.items()]
        opening_text = "\n\n".join(str(text) for text in texts if text)
        if not opening_text:
            return Opening(tools=schemas)
        *before, last = self._row["messages"]
        content = f"{last['content']}\n\n{opening_text}".strip()
        message = ChatMessage(role=last["role"], content=content)
        return Opening(messages=[*before, message], tools=schemas)

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
            methods = [each.reward for each in self._objects if hasattr(each, "reward")]
            rewards = [await call_foreign(method) for method in methods]
        return Turn(
            messages=[{"role": "tool", "content": answer.content} for answer in answers],
            done=not answers or answers[-1].done,
            rewards={self._name: sum(rewards)} if rewards else {},
        )

    async def close(self) -> None:
        methods = [each.close for each in self._objects if hasattr(each, "close")]
        calls = [call_foreign(method) for method in methods]
        await asyncio.gather(*calls, return_exceptions=True)

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
    """Makes environments that have the tools of several others.

    Args:
        parts: a name and a factory for each of the others. A factory's only tool is called by that
            name; "" leaves the tool its own.
    """

    def __init__(self, parts: Sequence[tuple[str, Factory]]) -> None:
        self._parts = parts

    def begin_run(self) -> None:
        for _, factory in self._parts:
            begin_run(factory)

    def __call__(self, **row: Any) -> Toolbox:
        """Build the environment of one episode.

        Raises:
            TypeError: an object is more than tools, or has a tool of the same name as another.
        """
        objects: list[Any] = []
        tools: dict[str, Tool] = {}
        for name, factory in self._parts:
            toolbox = factory(**accepted_columns(factory, row))
            objects.append(toolbox)
            new_tools = find_tools(toolbox)
            if name and len(new_tools) == 1:
                (tool,) = new_tools.values()
                new_tools = {name: tool}
            problem = ""
            if hasattr(toolbox, "step"):
                problem = "has turns of its own"
            elif new_tools.keys() & tools.keys():
                problem = "has a tool of the same name as another"
            if problem:
                raise TypeError(
                    f"{type(toolbox).__name__} {problem}: name it by --environment, not by --tools"
                )
            tools |= new_tools
        return Toolbox(objects, tools, row)


def _read_reset_text(result: Any) -> Any:
    """The text that a `reset` returned; a game's returns a text and a dict, as gymnasium's does.

    Raises:
        TypeError: it returned another tuple.
    """
    if not isinstance(result, tuple):
        return result
    if len(result) != 2 or not isinstance(result[1], Mapping):
        raise TypeError(
            "`reset` returned a tuple: let it return one text, or as gymnasium's a text and a dict"
        )
    return result[0]
