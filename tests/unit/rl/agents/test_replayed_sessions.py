"""Requests of recorded sessions are sent again, and their ids compared."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rl.agents.api_requests import RunSampling
from open_instruct.rl.agents.endpoint import AgentEndpoint
from open_instruct.rl.agents.recorded_sessions import RecordingEndpoint
from open_instruct.rl.agents.replayed_sessions import replay_session
from open_instruct.rl.agents.saved_requests import (
    SavedSession,
    read_sessions,
    save_session,
)
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from tests.refusals import refused
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.environments.test_environments import Engines
from tests.unit.rl.agents.test_recorded_sessions import SETTINGS, USER

SAMPLING = RunSampling(temperature=1.0, top_p=1.0, follows=True)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


def make_maker(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str | None]
) -> tuple[Callable[[int], AgentSession], Engines]:
    """Makes sessions by their seeds, whose replies are these texts."""
    template = TurnTemplate(ChatFormat.choose(tokenizer, "chatml"))
    pool: Any = Engines(tokenizer, texts)
    limits = SessionLimits(max_turns=99, max_context=500, turn_length=None, num_at_once=8)

    def make_session(seed: int) -> AgentSession:
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=400)
        request = GenerationRequest(
            request_id=str(seed), prompt_token_ids=(), seed=seed, sampling=sampling
        )
        return AgentSession(
            SessionTree(template),
            template,
            pool,
            request,
            limits,
            call_form="hermes",
            in_thread=asyncio.to_thread,
        )

    return make_session, pool


def chat(endpoint: AgentEndpoint, key: str, messages: Sequence[Any], **fields: Any) -> Any:
    """The message of an answer; None where it is an error, or a stream."""
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **fields}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError:
        return None
    return None if fields.get("stream") else json.loads(text)["choices"][0]["message"]


TEXTS = ["yes<|im_end|>", "no<|im_end|>", "so<|im_end|>", "or<|im_end|>"]


def record(tokenizer: PreTrainedTokenizerFast, folder: Path) -> SavedSession:
    """A session of four requests, of which one is refused and one asks for two replies."""

    async def play() -> None:
        make_session, _ = make_maker(tokenizer, TEXTS)
        endpoint = RecordingEndpoint(
            folder / "sessions.jsonl",
            make_session,
            SAMPLING,
            SETTINGS,
            chat_format="",
            silence_s=600.0,
        )
        await endpoint.start()
        writing = asyncio.ensure_future(endpoint.write_ended_sessions())
        first = await asyncio.to_thread(chat, endpoint, "mine", [USER])
        assert await asyncio.to_thread(chat, endpoint, "mine", [USER], logit_bias={"7": 1}) is None
        for fields in ({"n": 2}, {"stream": True}):
            history = [USER, first, USER | {"content": f"Sure? Ünd {fields}"}]
            await asyncio.to_thread(chat, endpoint, "mine", history, **fields)
        await endpoint.stop()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(play())
    (saved,) = read_sessions(folder / "sessions.requests.jsonl")
    return saved


def replay(
    tokenizer: PreTrainedTokenizerFast, saved: SavedSession, texts: Sequence[str | None]
) -> str:
    async def play() -> str:
        make_session, _ = make_maker(tokenizer, texts)
        endpoint = AgentEndpoint()
        await endpoint.start()
        session = make_session(saved.seed)
        key = endpoint.open_session(session, SAMPLING)
        difference = await replay_session(endpoint, session, key, saved)
        await endpoint.stop()
        return difference

    return asyncio.run(play())


def test_requests_of_a_session_are_sent_again_and_the_first_that_differs_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    saved = record(tokenizer, tmp_path)
    assert [each.status for each in saved.requests] == [200, 400, 200, 200]
    assert [len(each.replies) for each in saved.requests] == [1, 0, 2, 1]
    assert replay(tokenizer, saved, TEXTS) == ""
    other_reply = replay(tokenizer, saved, [*TEXTS[:2], "so it is<|im_end|>", TEXTS[3]])
    assert other_reply.startswith("request 3 of 4 (/v1/chat/completions): reply 2 of the answer")
    edited = saved.model_copy(deep=True)
    edited.requests[3].body["messages"][0]["content"] += "?"
    assert replay(tokenizer, edited, TEXTS).startswith("request 4 of 4 (/v1/chat/completions): p")
    edited = saved.model_copy(deep=True)
    edited.requests[1].body["logit_bias"] = None
    assert "request 2 of 4" in replay(tokenizer, edited, TEXTS)


def test_file_that_has_no_requests_is_refused_with_its_line(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "mine.requests.jsonl"
    save_session(path, record(tokenizer, tmp_path))
    with path.open("a") as file:
        file.write('{"messages": []}\n')
    with refused("unreadable_file") as refusal:
        list(read_sessions(path))
    assert "line 2" in str(refusal.value)
    with refused("unreadable_file"):
        list(read_sessions(tmp_path / "none"))
