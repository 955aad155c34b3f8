"""Sessions of a served model: each key's is recorded, as conversations and as exact ids."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import parse_conversation
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rewards.event_loop import start_loop
from open_instruct.rl.agents.api_requests import RunSampling
from open_instruct.rl.agents.recorded_sessions import RecordingEndpoint
from open_instruct.rl.agents.saved_requests import SessionSettings
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.environments.test_environments import Engines
from tests.waiting import eventually

USER = {"role": "user", "content": "What is 2 + 3?"}
SETTINGS = SessionSettings(
    model="policy",
    param_dtype="float32",
    max_seq_length=500,
    temperature=1.0,
    top_p=1.0,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


class Recording:
    """An endpoint that records to `path`, before an engine that gives the replies in turn."""

    def __init__(self, chat: ChatFormat, path: Path, replies: list[str], silence_s: float) -> None:
        self.path = path
        self.pool: Any = Engines(chat.tokenizer, replies)
        self._template = TurnTemplate(chat)
        self._endpoint = RecordingEndpoint(
            path,
            self._make_session,
            RunSampling(temperature=1.0, top_p=1.0, follows=True),
            SETTINGS,
            chat_format=chat.fingerprint,
            silence_s=silence_s,
        )
        self._loop = start_loop("recording")
        self._call(self._endpoint.start())
        self._writing = asyncio.run_coroutine_threadsafe(
            self._endpoint.write_ended_sessions(), self._loop
        )

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _make_session(self, number: int) -> AgentSession:
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=400)
        request = GenerationRequest(
            request_id=str(number), prompt_token_ids=(), seed=number, sampling=sampling
        )
        return AgentSession(
            SessionTree(self._template),
            self._template,
            self.pool,
            request,
            SessionLimits(max_turns=99, max_context=500, turn_length=None, num_at_once=8),
            call_form="hermes",
            in_thread=asyncio.to_thread,
        )

    def post(self, key: str, path: str, body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._endpoint.base_url}/{path}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def chat(self, key: str, messages: list[dict[str, str]]) -> dict[str, str]:
        answer = self.post(key, "chat/completions", {"model": "policy", "messages": messages})
        message: dict[str, str] = answer["choices"][0]["message"]
        return message

    def rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        self._writing.cancel()
        self._call(self._endpoint.stop())


def test_each_key_is_a_session_that_becomes_rows_to_learn_from(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat = ChatFormat.choose(tokenizer, "chatml")
    replies = ["yes<|im_end|>", "no<|im_end|>", "so<|im_end|>"]
    recording = Recording(chat, tmp_path / "sessions.jsonl", replies, silence_s=0.2)
    pool = recording.pool
    first = recording.chat("mine", [USER])
    recording.chat("other", [USER])
    recording.chat("mine", [USER, first, USER])
    eventually(lambda: len(recording.rows()) == 2, what="rows")
    recording.close()
    mine, other = sorted(recording.rows(), key=lambda row: -len(row["messages"]))
    assert mine["session"] != other["session"] and "mine" not in recording.path.read_text()
    texts = [turn["content"] for turn in mine["messages"]]
    assert texts == [USER["content"], "yes", USER["content"], "so"]
    assert len(parse_conversation(mine, "messages")) == 4
    sampled = mine["sampled"]
    (start, stop), _ = sampled["replies"]
    assert tokenizer.decode(sampled["token_ids"][start:stop]) == "yes<|im_end|>"
    assert pool.requests[2].prompt_token_ids == tuple(
        sampled["prompt_token_ids"] + sampled["token_ids"][: sampled["replies"][1][0]]
    )
    assert sampled["numbers"] == [0, 1] and sampled["turns"] == [1, 3]


def test_client_ends_its_session_with_a_reward(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat = ChatFormat.choose(tokenizer, "chatml")
    replies = ["yes<|im_end|>", "no<|im_end|>"]
    recording = Recording(chat, tmp_path / "sessions.jsonl", replies, silence_s=60.0)
    for path, body, problem in (
        ("session/end", {}, "no reply"),
        ("session/end", {"score": 1.0}, "the body is"),
        ("session/end", {"reward": "good"}, "no number"),
    ):
        with pytest.raises(HTTPError) as refused:
            recording.post("mine", path, body)
        assert problem in json.load(refused.value)["error"]["message"]
    recording.chat("mine", [USER])
    first = recording.post("mine", "session/end", {"reward": 0.5})
    recording.chat("mine", [USER])  # the same key, and another session
    second = recording.post("mine", "session/end", {})
    recording.close()
    rows = recording.rows()
    assert [row["session"] for row in rows] == [first["session"], second["session"]]
    assert first["session"] != second["session"] and first["num_rows"] == 1
    assert rows[0]["reward"] == 0.5 and "reward" not in rows[1]
