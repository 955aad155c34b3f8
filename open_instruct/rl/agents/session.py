"""A session: what one agent asks for, sampled from exact ids, within its limits."""

import asyncio
import hashlib
import time
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, EpisodeStatus
from open_instruct.generation.engine_pool import RequestRefused
from open_instruct.generation.requests import GenerationRequest, Home, make_sampling_seed
from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_requests import ReplyRequest
from open_instruct.rl.agents.messages import Turn
from open_instruct.rl.agents.reply_messages import read_reply
from open_instruct.rl.agents.session_tree import (
    HistoryRefused,
    ReplyPoint,
    SampledReply,
    SessionTree,
)
from open_instruct.rl.episodes.bridge import TurnTemplate

# Requests that may wait for those in progress, for each of them.
WAITING_PER_REQUEST = 16
# Requests that are sampled, or given up before, for each reply that an episode may have.
ATTEMPTS_PER_TURN = 8


class CallInThread(Protocol):
    """Calls a function in the one thread for templates and tokenizers."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class Engines(Protocol):
    """The engines, or what passes requests on to them."""

    def submit(self, request: GenerationRequest, home: Home) -> Future[Completion]:
        """Submit a request of a session, all of which have one home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may use.

    Example: `SessionLimits(max_turns=8, max_context=4096, turn_length=None, num_at_once=8)`.
    """

    max_turns: int  # replies, of all its branches
    max_context: int  # tokens of a prompt with its reply
    turn_length: int | None  # tokens of one reply
    num_at_once: int  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredReply:
    """A reply as the agent is told of it: a message of OpenAI's form."""

    node: SampledReply
    message: dict[str, Any]
    turn: Turn  # as the agent will repeat it
    token_texts: tuple[str, ...] = ()  # where the agent has asked for log-probs

    @property
    def finish_reason(self) -> str:
        if self.node.completion.is_truncated:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


class AgentSession:
    """Samples the replies of one episode. All its coroutines run in one loop.

    Attributes:
        stored: the turns up to each answer of /v1/responses, by the answer's id.
        limit: the way in which the episode has ended, where its last request was refused for that.
        is_cut: whether the last reply was cut at a limit of the run's.
        failure: of the engines; it ends the run.

    Args:
        first_request: of the episode: its seed, its id, and how the run samples.
        call_form: in which the policy calls tools.
    """

    def __init__(
        self,
        tree: SessionTree,
        template: TurnTemplate,
        pool: Engines,
        first_request: GenerationRequest,
        limits: SessionLimits,
        *,
        call_form: str,
        in_thread: CallInThread,
    ) -> None:
        self.tree = tree
        self.limit: EpisodeStatus | None = None
        self.is_cut = False
        self.failure: RunError | None = None
        self.stored: dict[str, tuple[Turn, ...]] = {}
        self._template = template
        self._pool = pool
        self._first_request = first_request
        self._limits = limits
        self._call_form = call_form
        self._in_thread = in_thread
        self._home = Home()
        self._free = asyncio.Semaphore(limits.num_at_once)
        self._num_open = 0
        self._num_sampling = 0
        self._num_attempts = 0
        self._num_turns = 0  # with those that are being sampled
        self._slots: defaultdict[bytes, set[int]] = defaultdict(set)
        self._silence_s = 0.0  # since the last reply, up to `_silent_since_s`
        self._silent_since_s = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def seed(self) -> int:
        """Of the session, on which those of its replies depend."""
        return self._first_request.seed

    @property
    def idle_s(self) -> float:
        """Seconds since the agent was given a reply; 0 while one is sampled.

        What is refused or given up counts for nothing, so that no agent can go on with it for ever.
        """
        if self._num_sampling:
            return 0.0
        return self._silence_s + time.monotonic() - self._silent_since_s

    def start_clock(self) -> None:
        """Count the agent's silence from now on, as its process has been started."""
        self._silence_s = 0.0
        self._silent_since_s = time.monotonic()

    @contextmanager
    def _stop_clock(self) -> Iterator[None]:
        """Count no silence while a reply is sampled, or several at once."""
        if not self._num_sampling:
            self._silence_s = self.idle_s
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            self._silent_since_s = time.monotonic()

    def close(self) -> None:
        """Give up all requests; later ones are refused."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request of the agent's, while it lasts.

        Raises:
            APIError: too many wait already, or the session is over.
        """
        if self._is_closed:
            raise APIError("the episode of this key is over", status=401, code="invalid_api_key")
        if self._num_open >= self._limits.num_at_once * (1 + WAITING_PER_REQUEST):
            raise APIError("too many requests at once", status=429, code="rate_limit_exceeded")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_open += 1
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._num_open -= 1

    async def reply(self, request: ReplyRequest) -> list[DeliveredReply]:
        """Sample the replies that a request asks for.

        Raises:
            APIError: a limit forbids them, or the template cannot write the history.
        """
        async with self._free:
            self._count_turns(request.num_replies)
            num_added = len(self.tree.replies)
            try:
                with self._stop_clock():
                    point = await self._in_thread(self._open, request)
                    max_tokens = self._find_max_tokens(point, request)
                    completions = await self._sample(point, request, max_tokens)
                    delivered: list[DeliveredReply] = await self._in_thread(
                        self._add, point, request, completions
                    )
            except BaseException:
                if len(self.tree.replies) == num_added:
                    self._num_turns -= request.num_replies
                raise
            self._silence_s = 0.0
        self.limit = None
        # An agent's own `max_tokens` is its own affair.
        are_cut = [each.node.completion.is_truncated for each in delivered]
        self.is_cut = any(are_cut) and max_tokens != request.max_tokens
        return delivered

    def _count_turns(self, num_replies: int) -> None:
        self._num_attempts += num_replies
        most_attempts = ATTEMPTS_PER_TURN * self._limits.max_turns
        num_turns = self._num_turns + num_replies
        if num_turns > self._limits.max_turns or self._num_attempts > most_attempts:
            self.limit = "max_turns"
            raise APIError(
                f"the episode has at most {self._limits.max_turns} replies (--max_turns)",
                code="episode_limit",
            )
        self._num_turns = num_turns

    def _open(self, request: ReplyRequest) -> ReplyPoint:
        """Find the ids that the reply is sampled after."""
        texts = [turn["content"] for turn in request.turns]
        texts += [str(tool) for tool in request.tools]
        if isinstance(request.text, str):
            texts.append(request.text)
        # Known before all of a text that is far too long is tokenised.
        if self._template.plain.has_more_tokens(texts, self._limits.max_context):
            self._refuse_length(f"more than {self._limits.max_context}")
        if isinstance(request.text, tuple) and max(request.text) >= self._template.num_tokens:
            raise APIError("a token id is not in the vocabulary", param="prompt")
        if request.text is not None:
            return self.tree.open_text(request.text, request.agent)
        try:
            return self.tree.open(request.turns, request.tools, request.agent)
        except HistoryRefused as error:
            raise APIError(str(error), param="messages") from error

    def _find_max_tokens(self, point: ReplyPoint, request: ReplyRequest) -> int:
        num_prompt = len(point.prompt_token_ids)
        num_left = self._limits.max_context - num_prompt
        if num_left < 1:
            self._refuse_length(str(num_prompt))
        bounds = [
            num_left,
            self._first_request.sampling.max_tokens,
            request.max_tokens or num_left,
            self._limits.turn_length or num_left,
        ]
        return min(bounds)

    def _refuse_length(self, num_tokens: str) -> None:
        self.limit = "length"
        raise APIError(
            f"This model's maximum context length is {self._limits.max_context} tokens. However, "
            f"your messages resulted in {num_tokens} tokens (--max_prompt_token_length and "
            "--response_length together).",
            param="messages",
            code="context_length_exceeded",
        )

    async def _sample(
        self, point: ReplyPoint, request: ReplyRequest, max_tokens: int
    ) -> list[Completion]:
        """The completions of a request, whose seeds depend on the ids before them alone.

        So requests that are sent at the same time have the same replies whichever comes first; the
        second of two equal ones has another seed.
        """
        digest = hashlib.blake2b(array("q", point.prompt_token_ids).tobytes()).digest()
        slots = self._slots[digest]
        own_slots: list[int] = []
        for _ in range(request.num_replies):
            slot = next(number for number in range(len(slots) + 1) if number not in slots)
            slots.add(slot)
            own_slots.append(slot)
        futures = []
        try:
            for slot in own_slots:
                generation = self._build_request(point, request, max_tokens, digest, slot)
                futures.append(asyncio.wrap_future(self._pool.submit(generation, self._home)))
            return list(await asyncio.gather(*futures))
        except BaseException as error:
            slots.difference_update(own_slots)  # sent again, it is sampled as it would have been
            for future in futures:
                future.cancel()
            if isinstance(error, RequestRefused):
                raise APIError(str(error)) from error
            if isinstance(error, RunError):
                self.failure = error
                raise APIError("the engines have failed", status=500) from error
            raise

    def _build_request(
        self,
        point: ReplyPoint,
        request: ReplyRequest,
        max_tokens: int,
        digest: bytes,
        slot: int,
    ) -> GenerationRequest:
        first = self._first_request
        seed = first.seed
        request_id = first.request_id
        # The row's prompt is sampled as it would be without an agent.
        is_first = point.prompt_token_ids == first.prompt_token_ids and slot == 0
        if not is_first or request.seed is not None:
            own_seed = "" if request.seed is None else request.seed
            seed = make_sampling_seed(first.seed, digest.hex(), slot, own_seed)
            request_id = f"{first.request_id}/{seed:x}"
        sampling = replace(
            first.sampling,
            max_tokens=max_tokens,
            stop_strings=(*first.sampling.stop_strings, *request.stop),
        )
        if request.temperature is not None:
            sampling = replace(sampling, temperature=request.temperature)
        if request.top_p is not None:
            sampling = replace(sampling, top_p=request.top_p)
        if request.json_schema:
            sampling = replace(sampling, json_schema=request.json_schema)
        return replace(
            first,
            request_id=request_id,
            prompt_token_ids=point.prompt_token_ids,
            seed=seed,
            sampling=sampling,
        )

    def _add(
        self, point: ReplyPoint, request: ReplyRequest, completions: Sequence[Completion]
    ) -> list[DeliveredReply]:
        """Add completions to the tree; returns them as the agent is told of them."""
        delivered: list[DeliveredReply] = []
        for completion in completions:
            text, _ = self._template.decode_reply(completion.token_ids)
            message, turn = read_reply(
                text,
                request,
                call_form=self._call_form,
                is_only_thinking=point.is_only_thinking(text),
                name=f"{completion.seed:016x}",
            )
            node = self.tree.add(point, completion, turn, is_learned=request.is_learned)
            token_texts: tuple[str, ...] = ()
            if request.has_logprobs:
                token_texts = tuple(map(self._template.decode_token, completion.token_ids))
            delivered.append(
                DeliveredReply(node=node, message=message, turn=turn, token_texts=token_texts)
            )
        return delivered
