"""Episodes of several turns: the engine replies, the environment answers, until one of them is
done.

All episodes of a run are coroutines of one thread, in which nothing takes long: templates and
tokenizers work in a second one, and environments in others still. One that waits for its
environment holds no slot of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Episode, EpisodeStatus, Prompt, Span
from open_instruct.data.chat import ChatFormat
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.argument_types import read_arguments
from open_instruct.environments.environment import (
    ChatMessage,
    Environment,
    Factory,
    Opening,
    Reply,
    ToolCall,
    find_dedicated_loop,
)
from open_instruct.environments.foreign_calls import (
    FOREIGN_LOOP,
    EnvironmentFault,
    call_foreign,
    describe_error,
    foreign_loop,
)
from open_instruct.environments.loop_watch import INTERVAL_S, LIMIT_S, LoopWatch
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.requests import GenerationRequest, Home, sampling_seed
from open_instruct.rewards.event_loop import start_loop
from open_instruct.rewards.finite import read_reward
from open_instruct.rl.episodes.bridge import Conversation, TurnTemplate
from open_instruct.rl.episodes.tool_calls import ToolCallError, detect_call_form, tool_calls

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0
# Of a turn, its beginning and its end, in traces and reports.
MAX_TRACE_CHARACTERS = 20_000
# An episode of such a status was cut, for those who penalise or mask that; so was one whose last
# reply was.
CUT = ("length", "max_turns")


class EnvironmentLate(Exception):
    """An environment has not answered in time."""


class Conversations:
    """Runs episodes in environments; thread-safe. `close` gives up those in flight, and closes
    their environments.

    Args:
        warn: is given a message about an environment that holds up others.
        blocked_limit_s: how long one may block the event loop of all environments without such a
            message.
    """

    def __init__(
        self,
        pool: EnginePool,
        chat: ChatFormat,
        factories: Mapping[str, Factory],
        config: GRPOConfig,
        *,
        warn: Callable[[str], None] = lambda text: None,
        blocked_limit_s: float = LIMIT_S,
    ) -> None:
        self._pool = pool
        self._template = TurnTemplate(chat)
        self._factories = factories
        self._flags = config.environment
        self._max_prompt_tokens = config.data.max_prompt_token_length
        is_auto = self._flags.tool_call_form == "auto"
        self._form = detect_call_form(chat.template.text) if is_auto else self._flags.tool_call_form
        self._loop = start_loop("episodes")
        # One thread, as a tokenizer is for one at a time.
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="turns")
        watch = partial(
            LoopWatch,
            warn=warn,
            limit_s=blocked_limit_s,
            interval_s=min(blocked_limit_s, INTERVAL_S),
        )
        self._watch = watch(foreign_loop(), thread_name=FOREIGN_LOOP)
        self._own_watches = {
            name: watch(
                start_loop(own.name), thread_name=own.name, environment=name, package=own.package
            )
            for name, factory in factories.items()
            if (own := find_dedicated_loop(factory)) is not None
        }

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """The future completion of an episode that begins with `request`."""
        return asyncio.run_coroutine_threadsafe(self._episode(prompt, request), self._loop)

    def close(self) -> None:
        """Return once the environments of all episodes in flight are closed, or have not closed in
        time.
        """
        # What is left in the latter holds sessions of servers.
        for loop in (self._loop, foreign_loop()):
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._give_up(), loop).result(2 * CLOSE_TIMEOUT_S)
        for watch in (self._watch, *self._own_watches.values()):
            watch.close()
        self._rendering.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    async def _give_up() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(self, prompt: Prompt, request: GenerationRequest) -> Completion:
        walked = _Walked(request, adds_rewards=self._flags.reward_aggregator == "sum")
        environment: Environment | None = None
        try:
            environment = made = await self._in_time(
                call_foreign(make_environment, self._factories[prompt.environment], prompt.row),
                prompt.environment,
            )
            status = await self._walk(prompt, made, walked)
            problem = ""
        except EnvironmentLate as late:
            status, problem = "timeout", str(late)
        except (RunError, asyncio.CancelledError):  # the engines are lost, or the run ends
            raise
        except Exception as error:  # foreign code, which may raise anything
            status, problem = "env_error", describe_error(error)
        finally:
            if environment is not None:
                with suppress(Exception):
                    await self._in_time(environment.close(), prompt.environment, CLOSE_TIMEOUT_S)
        return walked.completion(status, problem)

    async def _walk(
        self, prompt: Prompt, environment: Environment, walked: _Walked
    ) -> EpisodeStatus:
        """Ask and answer in turn; `walked` has what has come of it, also if this raises."""
        flags = self._flags
        opening = await self._in_time(environment.start(), prompt.environment)
        walked.add_turns(prompt.row["messages"] if opening.messages is None else opening.messages)
        talk = await self._in_thread(self._open, prompt, opening)
        walked.begin(talk, is_own=opening.messages is not None or bool(opening.tools))
        names = [tool["function"]["name"] for tool in opening.tools]
        max_turns = min(flags.max_turns, int(prompt.row.get("max_steps") or flags.max_turns))
        for turn in range(max_turns):
            asked = walked.request(turn, turn_length=flags.turn_length)
            reply = await asyncio.wrap_future(self._pool.submit(asked, walked.home))
            text = await self._in_thread(talk.reply, reply.token_ids)
            walked.add_reply(reply, text)
            if walked.num_left <= 0 and reply.is_truncated:
                return "length"
            try:
                calls = (
                    ()
                    if not names or talk.is_only_thinking(text)
                    else tool_calls(text, self._form, names)
                )
            except ToolCallError as error:
                walked.turns.append({"role": "parse_error", "content": str(error)})
                return "parse_error"
            calls = tuple(_with_types(call, opening.tools) for call in calls)
            step = environment.step(Reply(text=text, calls=calls))
            answer = await self._in_time(step, prompt.environment)
            walked.add_turns(answer.messages)
            walked.add_rewards(answer.rewards)
            if answer.done:
                return "done"
            if turn + 1 == max_turns:
                return "max_turns"
            if walked.num_left <= 0:
                return "length"
            is_added = await self._in_thread(
                talk.answer, answer.messages, max_tokens=walked.num_left
            )
            if not is_added or walked.num_left <= 0:
                return "length"
        raise AssertionError("a last turn returns")

    def _open(self, prompt: Prompt, opening: Opening) -> Conversation:
        """The conversation that an environment begins.

        Raises:
            ValueError: it begins with more tokens than there may be, of which few were counted if
                there are far too many.
        """
        row_messages = prompt.row["messages"]
        messages = row_messages if opening.messages is None else opening.messages
        if opening.messages is None and not opening.tools:
            return Conversation(self._template, messages, (), prompt_token_ids=prompt.token_ids)
        limit = self._max_prompt_tokens
        text = self._template.render(self._template.with_tools(messages, opening.tools))
        is_too_long = self._template.plain.has_more_tokens([text], limit)
        num_tokens = f"more than {limit}"
        if not is_too_long:
            row_texts = [
                each["content"] for each in row_messages if isinstance(each["content"], str)
            ]
            talk = Conversation(self._template, messages, opening.tools, row_texts=row_texts)
            is_too_long = len(talk.token_ids) > limit
            num_tokens = str(len(talk.token_ids))
        if is_too_long:
            raise ValueError(
                f"the environment's first prompt has {num_tokens} tokens ({len(text):,} "
                f"characters): raise --max_prompt_token_length {limit}"
            )
        return talk

    async def _in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What a function of templates and tokenizers returns, in the one thread that they are
        for.
        """
        return await self._loop.run_in_executor(self._rendering, partial(function, *args, **kwargs))

    async def _in_time(self, call: Awaitable[T], name: str, timeout_s: float | None = None) -> T:
        """What foreign code of the environment of that name answers.

        Raises:
            EnvironmentLate: it has not within its time.
        """
        limit_s = timeout_s or self._flags.environment_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await call
        except TimeoutError as error:
            if not deadline.expired():  # one of its own
                raise
            blocked = await self._find_blocked_loop(name)
            why = f", while {blocked}" if blocked else ""
            raise EnvironmentLate(f"the environment took longer than {limit_s:g} s{why}") from error
        except RunError as error:  # none of ours: this one ends its episode alone
            raise EnvironmentFault(describe_error(error)) from error

    async def _find_blocked_loop(self, name: str) -> str:
        """Which loop that the environment of that name needs is blocked, and by what; empty if
        none.
        """
        for watch in (self._own_watches.get(name), self._watch):
            if watch is not None and (blocked := await watch.probe()):
                return blocked
        return ""


def _with_types(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """A call with the arguments that the schema of its tool asks for."""
    if not call.are_texts:
        return call
    return replace(
        call, arguments=read_arguments(call.arguments, tools, call.name), are_texts=False
    )


@dataclass(slots=True)
class _Walked:
    """What an episode has come to: its tokens after the first prompt, which of them were sampled,
    and its turns.
    """

    asked: GenerationRequest
    adds_rewards: bool
    home: Home = field(default_factory=Home)
    # Of all turns so far; the conversation adds to them.
    token_ids: list[int] = field(default_factory=list)
    num_prompt: int = 0
    own_prompt: tuple[int, ...] = ()
    replies: list[Completion] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    # In `token_ids`; the conversation adds to them.
    answers: list[Span] = field(default_factory=list)
    turns: list[Mapping[str, str]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    routes: bytes = b""

    def begin(self, talk: Conversation, *, is_own: bool) -> None:
        self.token_ids = talk.token_ids
        self.answers = talk.answers
        self.num_prompt = len(talk.token_ids)
        self.own_prompt = tuple(talk.token_ids) if is_own else ()

    @property
    def num_left(self) -> int:
        """Tokens that may still follow."""
        return self.asked.sampling.max_tokens - (len(self.token_ids) - self.num_prompt)

    def request(self, turn: int, *, turn_length: int | None) -> GenerationRequest:
        """The request of a turn; that of turn 0 is the episode's own, so that one turn is what it
        is without any.
        """
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
        # Of all tokens so far: each keeps what it was sampled with.
        self.routes += reply.routes[len(self.routes) :]
        self.spans.append(Span(start=stop - len(reply.token_ids), stop=stop))
        self.turns.append({"role": "assistant", "content": text})

    def add_turns(self, messages: Sequence[ChatMessage]) -> None:
        for message in messages:
            self.turns.append({"role": message["role"], "content": _cut_middle(message["content"])})

    def add_rewards(self, rewards: Mapping[str, float]) -> None:
        for name, reward in rewards.items():
            before = self.rewards.get(name, 0.0) if self.adds_rewards else 0.0
            self.rewards[name] = read_reward(before + read_reward(reward, name), name)

    def completion(self, status: EpisodeStatus, problem: str) -> Completion:
        """All of it as one completion, which ends with its last reply."""
        num_tokens = self.spans[-1].stop if self.spans else 0
        behind_prompt = (
            Span(start=answer.start - self.num_prompt, stop=answer.stop - self.num_prompt)
            for answer in self.answers
        )
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
                answers=tuple(answer for answer in behind_prompt if answer.stop <= num_tokens),
                turns=tuple(self.turns),
                rewards=self.rewards,
                prompt_token_ids=self.own_prompt,
                problem=problem,
            ),
        )


def _cut_middle(text: str) -> str:
    """A text of a trace, which leaves out the middle of a long one."""
    num_left_out = len(text) - MAX_TRACE_CHARACTERS
    if num_left_out <= 0:
        return text
    half = MAX_TRACE_CHARACTERS // 2
    return f"{text[:half]}\n[… {num_left_out:,} characters are left out here …]\n{text[-half:]}"
