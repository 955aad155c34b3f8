"""Sessions of a served model: each key's is recorded, as conversations and as exact ids."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import parse_conversation
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rewards.event_loop import start_loop
from open_instruct.rl.agents.api_requests import RunSampling
from open_instruct.rl.agents.recorded_sessions import RecordingEndpoint
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.environments.test_environments import Engines
from tests.waiting import eventually

USER = {"role": "user", "content": "What is 2 + 3?"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


def test_each_key_is_a_session_that_becomes_rows_to_learn_from(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    template = TurnTemplate(ChatFormat.choose(tokenizer, "chatml"))
    pool: Any = Engines(tokenizer, ["yes<|im_end|>", "no<|im_end|>", "so<|im_end|>"])
    limits = SessionLimits(max_turns=99, max_context=500, turn_length=None, num_at_once=8)

    def make_session(number: int) -> AgentSession:
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=400)
        request = GenerationRequest(
            request_id=str(number), prompt_token_ids=(), seed=number, sampling=sampling
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

    path = tmp_path / "sessions.jsonl"
    sampling = RunSampling(temperature=1.0, top_p=1.0, follows=True)
    endpoint = RecordingEndpoint(path, make_session, sampling, silence_s=0.2)
    loop = start_loop("recording")
    asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result(10)
    writing = asyncio.run_coroutine_threadsafe(endpoint.write_ended_sessions(), loop)

    def chat(key: str, messages: list[dict[str, str]]) -> dict[str, str]:
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            message: dict[str, str] = json.load(answer)["choices"][0]["message"]
        return message

    first = chat("mine", [USER])
    chat("other", [USER])
    chat("mine", [USER, first, USER])
    eventually(lambda: path.exists() and len(path.read_text().splitlines()) == 2, what="rows")
    writing.cancel()
    asyncio.run_coroutine_threadsafe(endpoint.stop(), loop).result(10)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    mine, other = sorted(rows, key=lambda row: -len(row["messages"]))
    assert mine["session"] != other["session"] and "mine" not in path.read_text()
    texts = [turn["content"] for turn in mine["messages"]]
    assert texts == [USER["content"], "yes", USER["content"], "so"]
    assert len(parse_conversation(mine, "messages")) == 4
    sampled = mine["sampled"]
    (start, stop), _ = sampled["replies"]
    assert tokenizer.decode(sampled["token_ids"][start:stop]) == "yes<|im_end|>"
    assert pool.requests[2].prompt_token_ids == tuple(
        sampled["prompt_token_ids"] + sampled["token_ids"][: sampled["replies"][1][0]]
    )
