"""Objects that users write become environments: whole environments, games, and classes of tools."""

from collections.abc import Mapping
from typing import Any

from open_instruct.core.user_code import accepted_columns
from open_instruct.environments.environment import (
    ChatMessage,
    Environment,
    Factory,
    Opening,
    Reply,
    Turn,
)
from open_instruct.environments.foreign_calls import call_foreign
from open_instruct.environments.toolbox import Toolbox, find_tools


def make_environment(factory: Factory, row: Mapping[str, Any]) -> Environment:
    """Build the environment of one episode, from the columns of the row that the factory takes.

    Raises:
        TypeError: the factory makes none of the three kinds.
    """
    user_object = factory(**accepted_columns(factory, row))
    if callable(getattr(user_object, "start", None)) and callable(
        getattr(user_object, "step", None)
    ):
        return UserEnvironment(user_object)
    if callable(getattr(user_object, "step", None)) and callable(
        getattr(user_object, "reset", None)
    ):
        return Game([user_object], {}, row)
    tools = find_tools(user_object)
    if tools:
        return Toolbox([user_object], tools, row)
    raise TypeError(
        f"{type(user_object).__name__} is no environment: it has neither `start` and `step`, nor "
        "`reset` and `step`, nor public methods that are tools"
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


class Game(Toolbox):
    """A game with gymnasium's `reset` and `step`, whose observations and actions are texts.

    `reset()` returns an observation, or an observation and a dict; it is called with the columns of
    the row that it takes. `step(text)` returns an observation, a reward, and whether the game is
    over: in gymnasium's form, with terminated, truncated and a dict, or in the older one, with done
    and a dict.
    """

    async def step(self, reply: Reply) -> Turn:
        observation, reward, *ends = await call_foreign(self._objects[0].step, reply.text)
        is_done = any(end for end in ends if not isinstance(end, Mapping))
        messages: list[ChatMessage] = [{"role": "user", "content": str(observation)}]
        return Turn(messages=messages, done=is_done, rewards={self._name: reward})
