"""Episodes of several turns: the engine replies, the environment answers, until one of them is done.

All episodes of a run are coroutines of one thread. One that waits for its environment holds no slot of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from open_instruct.config.grpo import GRPOConfig
from open_instruct.data.chat import ChatFormat
from open_instruct.engines.engine_pool import EnginePool
from open_instruct.engines.requests import GenerationRequest, Home, sampling_seed
from open_instruct.environments.argument_types import read_arguments
from open_instruct.environments.environment import (
    ChatMessage,
    Environment,
    Factory,
    Reply,
    ToolCall,
    called,
    make_environment,
)
from open_instruct.episodes.bridge import Conversation, TurnTemplate
from open_instruct.episodes.tool_calls import ToolCallError, form_of_template, tool_calls
from open_instruct.errors import RunError
from open_instruct.records import Completion, Episode, EpisodeStatus, Prompt, Span
from open_instruct.verifiers.event_loop import lasting_loop

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0
# An episode of such a status was cut, for those who penalise or mask that; so was one whose last reply was.
CUT = ("length", "max_turns")


class Conversations:
    """Runs episodes in environments; thread-safe. `close` gives up those in flight, and closes their environments."""

    def __init__(
        self, pool: EnginePool, chat: ChatFormat, factories: Mapping[str, Factory], config: GRPOConfig
    ) -> None:
        self._pool = pool
        self._template = TurnTemplate(chat)
        self._factories = factories
        self._flags = config.environment
        self._max_prompt_tokens = config.data.max_prompt_token_length
        is_auto = self._flags.tool_call_form == "auto"
        self._form = form_of_template(chat.template.text) if is_auto else self._flags.tool_call_form
        self._loop = lasting_loop("episodes")

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """The future completion of an episode that begins with `request`."""
        return asyncio.run_coroutine_threadsafe(self._episode(prompt, request), self._loop)

    def close(self) -> None:
        """Return once the environments of all episodes in flight are closed, or have not closed in time."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._give_up(), self._loop).result(2 * CLOSE_TIMEOUT_S)

    async def _give_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(self, prompt: Prompt, request: GenerationRequest) -> Completion:
        walked = _Walked(request, adds_rewards=self._flags.reward_aggregator == "sum")
        environment: Environment | None = None
        try:
            environment = made = await self._in_time(
                called(make_environment, self._factories[prompt.environment], prompt.row)
            )
            status = await self._walk(prompt, made, walked)
            problem = ""
        except TimeoutError:
            status, problem = "timeout", f"the environment took longer than {self._flags.environment_timeout_s:g} s"
        except (RunError, asyncio.CancelledError):  # the engines are lost, or the run ends
            raise
        except Exception as error:  # foreign code, which may raise anything
            status, problem = "env_error", f"{type(error).__name__}: {error}"
        finally:
            if environment is not None:
                with suppress(Exception):
                    await self._in_time(environment.close(), CLOSE_TIMEOUT_S)
        return walked.completion(status, problem)

    async def _walk(self, prompt: Prompt, environment: Environment, walked: _Walked) -> EpisodeStatus:
        """Ask and answer in turn; `walked` has what has come of it, also if this raises."""
        flags = self._flags
        opening = await self._in_time(environment.start())
        is_own = opening.messages is not None or bool(opening.tools)
        messages = prompt.row["messages"] if opening.messages is None else opening.messages
        talk = Conversation(
            self._template, messages, opening.tools, prompt_token_ids=None if is_own else prompt.token_ids
        )
        walked.begin(talk.token_ids, messages, is_own=is_own)
        if len(talk.token_ids) > self._max_prompt_tokens:
            raise ValueError(
                f"the environment's first prompt has {len(talk.token_ids)} tokens: raise --max_prompt_token_length "
                f"{self._max_prompt_tokens}"
            )
        names = [tool["function"]["name"] for tool in opening.tools]
        max_turns = min(flags.max_turns, int(prompt.row.get("max_steps") or flags.max_turns))
        for turn in range(max_turns):
            asked = walked.request(turn, turn_length=flags.turn_length)
            reply = await asyncio.wrap_future(self._pool.submit(asked, walked.home))
            text = talk.reply(reply.token_ids)
            walked.add_reply(reply, text)
            if walked.num_left <= 0 and reply.is_truncated:
                return "length"
            try:
                calls = () if not names or talk.is_thought(text) else tool_calls(text, self._form, names)
            except ToolCallError as error:
                walked.turns.append({"role": "parse_error", "content": str(error)})
                return "parse_error"
            calls = tuple(_with_types(call, opening.tools) for call in calls)
            answer = await self._in_time(environment.step(Reply(text=text, calls=calls)))
            walked.add_answer(answer.messages, answer.rewards)
            if answer.done:
                return "done"
            if turn + 1 == max_turns:
                return "max_turns"
            talk.answer(answer.messages)
            if walked.num_left <= 0:
                return "length"
        raise AssertionError("a last turn returns")

    async def _in_time(self, call: Awaitable[T], timeout_s: float | None = None) -> T:
        """What foreign code answers, within its time."""
        try:
            async with asyncio.timeout(timeout_s or self._flags.environment_timeout_s):
                return await call
        except SystemExit as error:  # the loop would end with it, and so all other episodes
            raise RuntimeError(f"SystemExit: {error}") from error


def _with_types(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """A call with the arguments that the schema of its tool asks for."""
    if not call.are_texts:
        return call
    return replace(call, arguments=read_arguments(call.arguments, tools, call.name), are_texts=False)


@dataclass(slots=True)
class _Walked:
    """What an episode has come to: its tokens after the first prompt, which of them were sampled, and its turns."""

    asked: GenerationRequest
    adds_rewards: bool
    home: Home = field(default_factory=Home)
    token_ids: list[int] = field(default_factory=list)  # of all turns so far; the conversation adds to them
    num_prompt: int = 0
    own_prompt: tuple[int, ...] = ()
    replies: list[Completion] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: list[Mapping[str, str]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    routes: bytes = b""

    def begin(self, token_ids: list[int], messages: Sequence[Mapping[str, Any]], *, is_own: bool) -> None:
        self.token_ids = token_ids
        self.num_prompt = len(token_ids)
        self.own_prompt = tuple(token_ids) if is_own else ()
        self.turns += [{"role": message["role"], "content": message["content"]} for message in messages]

    @property
    def num_left(self) -> int:
        """Tokens that may still follow."""
        return self.asked.sampling.max_tokens - (len(self.token_ids) - self.num_prompt)

    def request(self, turn: int, *, turn_length: int | None) -> GenerationRequest:
        """The request of a turn; that of turn 0 is the episode's own, so that one turn is what it is without any."""
        asked = self.asked
        max_tokens = min(self.num_left, turn_length or self.num_left)
        return replace(
            asked,
            request_id=asked.request_id if turn == 0 else f"{asked.request_id}/{turn}",
            prompt_token_ids=tuple(self.token_ids),
            seed=asked.seed if turn == 0 else sampling_seed(asked.seed, turn),
            sampling=replace(asked.sampling, max_tokens=max_tokens),
        )

    def add_reply(self, reply: Completion, text: str) -> None:
        stop = len(self.token_ids) - self.num_prompt
        self.replies.append(reply)
        self.routes += reply.routes[len(self.routes) :]  # of all tokens so far: each keeps what it was sampled with
        self.spans.append(Span(start=stop - len(reply.token_ids), stop=stop))
        self.turns.append({"role": "assistant", "content": text})

    def add_answer(self, messages: Sequence[ChatMessage], rewards: Mapping[str, float]) -> None:
        self.turns += [{"role": message["role"], "content": message["content"]} for message in messages]
        for name, reward in rewards.items():
            before = self.rewards.get(name, 0.0) if self.adds_rewards else 0.0
            self.rewards[name] = before + float(reward)

    def completion(self, status: EpisodeStatus, problem: str) -> Completion:
        """All of it as one completion, which ends with its last reply."""
        num_tokens = self.spans[-1].stop if self.spans else 0
        is_cut = status in CUT or bool(self.replies and self.replies[-1].is_truncated)
        return Completion(
            token_ids=tuple(self.token_ids[self.num_prompt : self.num_prompt + num_tokens]),
            logprobs=tuple(value for reply in self.replies for value in reply.logprobs),
            versions=tuple(version for reply in self.replies for version in reply.versions),
            text=self.replies[-1].text if self.replies else "",
            finish_reason="length" if is_cut else "stop",
            seed=self.asked.seed,
            routes=self.routes,
            episode=Episode(
                status=status,
                replies=tuple(self.spans),
                turns=tuple(self.turns),
                rewards=self.rewards,
                prompt_token_ids=self.own_prompt,
                problem=problem,
            ),
        )
