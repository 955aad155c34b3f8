"""Episodes of several turns: the engine replies and the environment answers, until one is done.

All episodes of a run are coroutines of one thread, in which nothing takes long: templates and
tokenizers work in a second thread, and environments in others. An episode that waits for its
environment holds no slot of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
from open_instruct.generation.requests import GenerationRequest, Home, make_sampling_seed
from open_instruct.rewards.event_loop import start_loop
from open_instruct.rewards.finite import read_reward
from open_instruct.rl.episodes.bridge import Conversation, TurnTemplate
from open_instruct.rl.episodes.tool_calls import ToolCallError, detect_call_form, tool_calls
from open_instruct.rl.episodes.trace_text import cut_middle

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0
# An episode of such a status counts as cut, as does one whose last reply was cut.
CUT_STATUSES = ("length", "max_turns")


class EnvironmentLate(Exception):
    """An environment did not answer in time."""


class Conversations:
    """Runs episodes in environments; thread-safe.

    `close` gives up those in flight, and closes their environments.

    Args:
        warn: called with a message about an environment that holds up others.
        blocked_limit_s: how long an environment may block the event loop of all before `warn` is
            called.
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
        form: str = self._flags.tool_call_form
        if form == "auto":
            form = detect_call_form(chat.template.text)
        self._form = form
        self._loop = start_loop("episodes")
        # One thread, as a tokenizer is for one at a time.
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="turns")
        interval_s = min(blocked_limit_s, INTERVAL_S)
        watch = partial(LoopWatch, warn=warn, limit_s=blocked_limit_s, interval_s=interval_s)
        self._watch = watch(foreign_loop(), thread_name=FOREIGN_LOOP)
        self._dedicated_watches: dict[str, LoopWatch] = {}  # by the name of the environment
        for name, factory in factories.items():
            loop = find_dedicated_loop(factory)
            if loop is not None:
                self._dedicated_watches[name] = watch(
                    start_loop(loop.name),
                    thread_name=loop.name,
                    environment=name,
                    package=loop.package,
                )

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """Begin an episode with `request`; returns the future of its completion."""
        return asyncio.run_coroutine_threadsafe(self._run_episode(prompt, request), self._loop)

    def close(self) -> None:
        """Give up all episodes in flight; returns once their environments closed, or a time-out."""
        # Calls in the second loop hold sessions of servers.
        for loop in (self._loop, foreign_loop()):
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._give_up(), loop).result(2 * CLOSE_TIMEOUT_S)
        for watch in (self._watch, *self._dedicated_watches.values()):
            watch.close()
        self._rendering.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    async def _give_up() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_episode(self, prompt: Prompt, request: GenerationRequest) -> Completion:
        record = _EpisodeRecord(request, adds_rewards=self._flags.reward_aggregator == "sum")
        environment: Environment | None = None
        status: EpisodeStatus
        problem = ""
        try:
            factory = self._factories[prompt.environment]
            making = call_foreign(make_environment, factory, prompt.row)
            environment = await self._in_time(making, prompt.environment)
            assert environment is not None
            status = await self._take_turns(prompt, environment, record)
        except EnvironmentLate as late:
            status = "timeout"
            problem = str(late)
        except (RunError, asyncio.CancelledError):  # the engines are lost, or the run ends
            raise
        except Exception as error:  # foreign code, which may raise anything
            status = "env_error"
            problem = describe_error(error)
        finally:
            if environment is not None:
                with suppress(Exception):
                    await self._in_time(environment.close(), prompt.environment, CLOSE_TIMEOUT_S)
        return record.completion(status, problem)

    async def _take_turns(
        self, prompt: Prompt, environment: Environment, record: _EpisodeRecord
    ) -> EpisodeStatus:
        """Let engine and environment take turns; `record` has all of them, also if this raises."""
        flags = self._flags
        opening = await self._in_time(environment.start(), prompt.environment)
        messages = opening.messages
        if messages is None:
            messages = prompt.row["messages"]
        record.add_turns(messages)
        talk = await self._in_thread(self._open, prompt, opening)
        record.begin(talk, is_own=opening.messages is not None or bool(opening.tools))
        names = [tool["function"]["name"] for tool in opening.tools]
        max_turns = min(flags.max_turns, int(prompt.row.get("max_steps") or flags.max_turns))
        for turn in range(max_turns):
            request = record.build_request(turn, turn_length=flags.turn_length)
            reply = await asyncio.wrap_future(self._pool.submit(request, record.home))
            text = await self._in_thread(talk.reply, reply.token_ids)
            record.add_reply(reply, text)
            if record.num_left <= 0 and reply.is_truncated:
                return "length"
            try:
                calls: tuple[ToolCall, ...] = ()
                if names and not talk.is_only_thinking(text):
                    calls = tool_calls(text, self._form, names)
            except ToolCallError as error:
                record.turns.append({"role": "parse_error", "content": str(error)})
                return "parse_error"
            calls = tuple(_convert_arguments(call, opening.tools) for call in calls)
            step = environment.step(Reply(text=text, calls=calls))
            answer = await self._in_time(step, prompt.environment)
            record.add_turns(answer.messages)
            record.add_rewards(answer.rewards)
            if answer.done:
                return "done"
            if turn + 1 == max_turns:
                return "max_turns"
            if record.num_left <= 0:
                return "length"
            is_added = await self._in_thread(
                talk.answer, answer.messages, max_tokens=record.num_left
            )
            if not is_added or record.num_left <= 0:
                return "length"
        raise AssertionError("a last turn returns")

    def _open(self, prompt: Prompt, opening: Opening) -> Conversation:
        """Open the conversation that an environment begins.

        Raises:
            ValueError: its first prompt has too many tokens. Where it has far too many, not all are
                counted.
        """
        row_messages = prompt.row["messages"]
        messages = opening.messages
        if messages is None:
            messages = row_messages
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
        """Call a function in the one thread for templates and tokenizers; returns its result."""
        return await self._loop.run_in_executor(self._rendering, partial(function, *args, **kwargs))

    async def _in_time(self, call: Awaitable[T], name: str, timeout_s: float | None = None) -> T:
        """Wait for a call of the environment of that name, and return its result.

        Raises:
            EnvironmentLate: it does not come within the limit.
        """
        limit_s = timeout_s or self._flags.environment_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await call
        except TimeoutError as error:
            if not deadline.expired():  # the environment raised it
                raise
            blocker = await self._find_blocked_loop(name)
            why = f", while {blocker}" if blocker else ""
            raise EnvironmentLate(f"the environment took longer than {limit_s:g} s{why}") from error
        except RunError as error:  # an environment's error ends its own episode alone
            raise EnvironmentFault(describe_error(error)) from error

    async def _find_blocked_loop(self, name: str) -> str:
        """Find which loop of the environment is blocked, and by what; empty if none is."""
        for watch in (self._dedicated_watches.get(name), self._watch):
            if watch is None:
                continue
            blocker = await watch.probe()
            if blocker:
                return blocker
        return ""


def _convert_arguments(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Convert a call's arguments from texts to the types in the schema of its tool."""
    if not call.are_texts:
        return call
    return replace(
        call, arguments=read_arguments(call.arguments, tools, call.name), are_texts=False
    )


@dataclass(slots=True)
class _EpisodeRecord:
    """An episode so far: its tokens, which of them were sampled, and its turns."""

    first_request: GenerationRequest
    adds_rewards: bool
    home: Home = field(default_factory=Home)
    # Of all turns so far; the conversation adds to them.
    token_ids: list[int] = field(default_factory=list)
    num_prompt: int = 0
    own_prompt: tuple[int, ...] = ()  # of an environment that changes the row's prompt
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
        return self.first_request.sampling.max_tokens - (len(self.token_ids) - self.num_prompt)

    def build_request(self, turn: int, *, turn_length: int | None) -> GenerationRequest:
        """Build the request of a turn.

        Turn 0 has the id and the seed of the first request, so that an episode of one turn samples
        what it would without an environment.
        """
        first = self.first_request
        request_id = first.request_id
        seed = first.seed
        if turn > 0:
            request_id = f"{first.request_id}/{turn}"
            seed = make_sampling_seed(first.seed, turn)
        max_tokens = min(self.num_left, turn_length or self.num_left)
        return replace(
            first,
            request_id=request_id,
            prompt_token_ids=tuple(self.token_ids),
            seed=seed,
            sampling=replace(first.sampling, max_tokens=max_tokens),
        )

    def add_reply(self, reply: Completion, text: str) -> None:
        stop = len(self.token_ids) - self.num_prompt
        self.replies.append(reply)
        # A reply has the routes of all tokens so far; each token keeps those it was sampled with.
        self.routes += reply.routes[len(self.routes) :]
        self.spans.append(Span(start=stop - len(reply.token_ids), stop=stop))
        self.turns.append({"role": "assistant", "content": text})

    def add_turns(self, messages: Sequence[ChatMessage]) -> None:
        for message in messages:
            self.turns.append({"role": message["role"], "content": cut_middle(message["content"])})

    def add_rewards(self, rewards: Mapping[str, float]) -> None:
        for name, reward in rewards.items():
            before = self.rewards.get(name, 0.0) if self.adds_rewards else 0.0
            self.rewards[name] = read_reward(before + read_reward(reward, name), name)

    def completion(self, status: EpisodeStatus, problem: str) -> Completion:
        """The whole episode as one completion, which ends with its last reply."""
        num_tokens = 0
        text = ""
        is_cut = status in CUT_STATUSES
        if self.replies:
            num_tokens = self.spans[-1].stop
            text = self.replies[-1].text
            is_cut = is_cut or self.replies[-1].is_truncated
        behind_prompt = [
            Span(start=answer.start - self.num_prompt, stop=answer.stop - self.num_prompt)
            for answer in self.answers
        ]
        return Completion(
            token_ids=tuple(self.token_ids[self.num_prompt : self.num_prompt + num_tokens]),
            logprobs=tuple(chain.from_iterable(reply.logprobs for reply in self.replies)),
            versions=tuple(chain.from_iterable(reply.versions for reply in self.replies)),
            text=text,
            finish_reason="length" if is_cut else "stop",
            seed=self.first_request.seed,
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
