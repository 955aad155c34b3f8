"""Requests of one session that come at the same time, in any order, and some of which are given up."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from open_instruct.core.records import Completion
from open_instruct.data.chat import ChatFormat
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_requests import (
    RunSampling,
    read_chat_request,
    read_sampling,
)
from open_instruct.rl.agents.finished_session import build_completion
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from tests.tiers import num_examples
from tests.unit.data.test_chat import CHATML, make_tokenizer

SAMPLING = RunSampling(temperature=1.0, top_p=1.0, follows=True)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TEXTS = [
    "yes<|im_end|>",
    "cut",
    '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>',
]


class SlowPool:
    """Engines that finish requests in the order that a test says."""

    def __init__(self, template: TurnTemplate) -> None:
        self._template = template
        self.open: list[tuple[GenerationRequest, Future[Completion]]] = []
        self.finished: list[tuple[GenerationRequest, Completion]] = []
        self.num_tokens = 0

    def submit(self, request: GenerationRequest, home: object = None) -> Future[Completion]:
        future: Future[Completion] = Future()
        self.open.append((request, future))
        return future

    def finish(self, number: int, text: str) -> None:
        request, future = self.open.pop(number % len(self.open))
        if not future.set_running_or_notify_cancel():
            return
        ids = self._template.encode_text(text)[: request.sampling.max_tokens]
        first = self.num_tokens
        self.num_tokens += len(ids)
        has_end = ids[-1] in self._template.end_token_ids
        completion = Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-float(number) for number in range(first, self.num_tokens)),
            versions=tuple(range(first, self.num_tokens)),
            text=text.removesuffix("<|im_end|>"),
            finish_reason="stop" if has_end else "length",
            seed=request.seed,
        )
        self.finished.append((request, completion))
        future.set_result(completion)


@pytest.fixture(scope="module")
def template() -> TurnTemplate:
    return TurnTemplate(ChatFormat.choose(make_tokenizer(CHATML), "chatml"))


class Player:
    """An agent whose requests a test begins, finishes and gives up."""

    def __init__(self, template: TurnTemplate, *, max_turns: int) -> None:
        self.pool = SlowPool(template)
        self.tree = SessionTree(template)
        request = GenerationRequest(
            request_id="0",
            prompt_token_ids=(),
            seed=7,
            sampling=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=60),
        )
        limits = SessionLimits(
            max_turns=max_turns,
            max_context=400,
            turn_length=50,
            num_at_once=3,
        )
        pool: Any = self.pool
        self.session = AgentSession(
            self.tree,
            template,
            pool,
            request,
            limits,
            call_form="hermes",
            in_thread=call_at_once,
        )
        self.tasks: list[asyncio.Task[None]] = []
        self.histories: list[list[Mapping[str, Any]]] = [[{"role": "user", "content": "What?"}]]

    async def act(self, action: str, number: int, text: str) -> None:
        history = self.histories[number % len(self.histories)]
        if action in ("ask", "ask twice", "ask otherwise"):
            body: dict[str, Any] = {"model": "policy", "messages": history, "tools": [TOOL]}
            body["n"] = 2 if action == "ask twice" else 1
            body["temperature"] = 0.5 if action == "ask otherwise" else 1.0
            self.tasks.append(asyncio.ensure_future(self._ask(body)))
        elif action == "finish" and self.pool.open:
            self.pool.finish(number, text)
        elif action == "give up" and self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
        elif action == "cut" and len(history) > 2:
            self.histories.append([history[0], *history[-2:]])
        for _ in range(5):
            await asyncio.sleep(0)

    async def _ask(self, body: Mapping[str, Any]) -> None:
        with self.session.request(), suppress(APIError):
            for reply in await self.session.reply(read_chat_request(body, SAMPLING)):
                answer = {"role": "user", "content": "more"}
                self.histories.append([*body["messages"], reply.message, answer])

    async def end(self) -> None:
        while not all(task.done() for task in self.tasks):
            await self.act("finish", 0, "yes<|im_end|>")
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def call_at_once(function: Any, *args: Any) -> Any:
    return function(*args)


actions = st.tuples(
    st.sampled_from(
        ["ask", "ask", "ask", "ask twice", "ask otherwise", "finish", "finish", "give up", "cut"]
    ),
    st.integers(0, 99),
    st.sampled_from(TEXTS),
)


# Some of several requests at once are answered, and others given up.
ANSWERED_AND_GIVEN_UP = [("ask", 0, TEXTS[0])] * 5 + [
    ("finish", 0, TEXTS[0]),
    ("finish", 0, TEXTS[0]),
    ("give up", 87, TEXTS[0]),
]


@settings(max_examples=num_examples(90), deadline=None)
@given(drawn=st.lists(actions, max_size=24), max_turns=st.sampled_from([3, 40]))
@example(drawn=ANSWERED_AND_GIVEN_UP, max_turns=3)
def test_what_is_delivered_is_learned_once_and_nothing_else(
    template: TurnTemplate, drawn: Sequence[tuple[str, int, str]], max_turns: int
) -> None:
    async def play() -> Player:
        player = Player(template, max_turns=max_turns)
        for action in drawn:
            await player.act(*action)
        await player.end()
        return player

    player = asyncio.run(play())
    assert player.session.idle_s >= 0.0 and len(player.tree.replies) <= max_turns
    completion = build_completion(player.tree, seed=0, status="done", rewards={})
    assert completion.episode is not None
    learned = list(completion.versions)
    for branch in completion.episode.branches:
        learned += branch.versions[branch.num_shared_tokens :]
    delivered = [
        version
        for node in player.tree.replies
        for version in node.completion.versions
        if node.is_learned
    ]
    assert sorted(learned) == sorted(delivered)
    sampled = [
        (request.prompt_token_ids, completion) for request, completion in player.pool.finished
    ]
    assert all((node.prompt_token_ids, node.completion) in sampled for node in player.tree.replies)
    seeds = [request.seed for request, _ in player.pool.finished]
    kept = [node.completion.seed for node in player.tree.replies]
    assert len(set(kept)) == len(kept) <= len(seeds)


def test_agent_that_names_the_temperature_of_training_is_evaluated_as_others_are() -> None:
    run = RunSampling(temperature=0.0, top_p=1.0, follows=False, trained_temperature=0.7)
    assert read_sampling(0.7, 1.0, run) == read_sampling(0.0, None, run) == {}
    with pytest.raises(APIError):
        read_sampling(0.8, None, run)
