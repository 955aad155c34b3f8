"""Environments of the package `verifiers`, run as its own loop would, with our engine as the model.

The prompts' file has its rows; `messages` is the conversation that an episode begins with.
"""

import asyncio
import json
import signal
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, TypeVar

from open_instruct.core.errors import InputError
from open_instruct.environments.environment import (
    ChatMessage,
    DedicatedLoop,
    EnvironmentFault,
    Opening,
    Reply,
    Source,
    Turn,
)
from open_instruct.rewards.event_loop import start_loop

T = TypeVar("T")


class Taskset(Source):
    """Makes the environments of episodes.

    Example: `Taskset("wordle", origin="--environment verifiers:wordle")`; `wordle:{"num_guesses":
    4}` has settings.
    """

    def __init__(self, where: str, *, origin: str) -> None:
        self._name, _, self._settings = where.partition(":")
        self._origin = origin
        # Its rewards may be slow functions that run in the loop itself, so it shares none.
        self._loop_name = f"taskset {self._name}"
        self.dedicated_loop = DedicatedLoop(name=self._loop_name, package="verifiers")

    def begin_run(self) -> None:
        """Load it.

        Raises:
            InputError: the package or the environment is not there, or cannot be played turn by
                turn.
        """
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            import verifiers

            settings = json.loads(self._settings or "{}")
            self._taskset = verifiers.load_environment(self._name, **settings)
        except ImportError as error:
            raise InputError(
                f"{self._origin} needs a package: pip install 'open-instruct[verifiers]'",
                kind="missing_package",
            ) from error
        except Exception as error:  # it is foreign code, which may raise anything
            raise InputError(
                f"{self._origin} cannot be loaded: {error}", kind="own_code"
            ) from error
        finally:  # each of its environments takes Ctrl-C for itself
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._loop = start_loop(self._loop_name)
        for each in getattr(self._taskset, "envs", [self._taskset]):
            if not isinstance(each, verifiers.MultiTurnEnv) or each.message_type != "chat":
                raise InputError(
                    f"{self._origin}: {type(each).__name__} is none of turns of chat "
                    "(MultiTurnEnv)",
                    kind="bad_value",
                )

    def __call__(self, **row: Any) -> "Episode":
        taskset = self._taskset
        if hasattr(taskset, "get_env_for_task"):
            taskset = taskset.get_env_for_task(row.get("task", ""))
        return Episode(taskset, row, self._loop)


class Episode:
    """One rollout of a taskset, which the rubric judges once a condition has ended it."""

    def __init__(
        self, taskset: Any, row: Mapping[str, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._taskset = taskset
        self._row = {
            "example_id": 0,
            **row,
            "prompt": row["messages"],
        }
        self._loop = loop
        self._state: Any = None

    async def start(self) -> Opening:
        return await self._run_in_loop(self._start())

    async def step(self, reply: Reply) -> Turn:
        return await self._run_in_loop(self._step(reply))

    async def close(self) -> None:
        if self._state is not None and not self._state["is_completed"]:
            # With this condition the taskset releases what it holds.
            self._state["prompt_too_long"] = True
            await self._run_in_loop(self._taskset.is_completed(self._state))

    async def _run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _start(self) -> Opening:
        state = await self._taskset.init_state(self._row, client=None, model="policy")
        self._state = await self._taskset.setup_state(state)
        self._conversation = await self._taskset.get_prompt_messages(self._state)
        messages = _read_texts(self._conversation)
        return Opening(messages=messages, tools=self._state["oai_tools"] or ())

    async def _step(self, reply: Reply) -> Turn:
        # A copy, as the taskset may change the turns themselves.
        before = [*deepcopy(self._conversation), _make_message(reply)]
        await self._taskset.add_trajectory_step(
            self._state,
            {
                "prompt": self._conversation,
                "completion": before[-1:],
                "is_truncated": False,
                "trajectory_id": self._state["trajectory_id"],
                "extras": {},
                **dict.fromkeys(("response", "tokens", "reward", "advantage")),  # there are none
            },
        )
        if not await self._taskset.is_completed(self._state):
            self._conversation = await self._taskset.get_prompt_messages(self._state)
            if not await self._taskset.is_completed(self._state):  # with its last answer, it may be
                if self._conversation[: len(before)] != before:
                    raise EnvironmentFault(
                        f"{type(self._taskset).__name__} changes turns that have been"
                    )
                return Turn(messages=_read_texts(self._conversation[len(before) :]))
        await self._taskset.render_completion(self._state)
        await self._taskset.rubric.score_rollout(self._state, nullcontext())
        name = self._taskset.env_id or "taskset"
        return Turn(done=True, rewards={name: float(self._state["reward"])})


def _make_message(reply: Reply) -> dict[str, Any]:
    """A reply as an API would return it; it has `tool_calls` only if there are any."""
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for index, call in enumerate(reply.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if calls:
        message["tool_calls"] = calls
    return message


def _read_texts(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Read turns as templates render them; raises `EnvironmentFault` for pictures and sounds."""
    for each in messages:
        if not isinstance(each["content"], str):
            raise EnvironmentFault(f"a turn of role {each['role']} is not a text alone")
    return [{"role": each["role"], "content": each["content"]} for each in messages]
