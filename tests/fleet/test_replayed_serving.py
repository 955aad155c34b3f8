"""`open-instruct serve --replay`: requests that a real engine has answered are sent to it again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.tiny_model import write_tiny_model
from tests.fleet.test_recorded_serving import serving
from tests.ranks.fork_server import REPOSITORY

pytestmark = pytest.mark.extended

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
# Of few texts, so that random weights end one in time.
ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "is_sure": {"type": "boolean"}},
    "required": ["answer", "is_sure"],
    "additionalProperties": False,
}
REPLAY_TIMEOUT_S = 240


def ask(url: str, model: Path) -> dict[str, Any]:
    """An unmodified client asks in each way; returns the answer that is held to a schema."""
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=url, api_key="mine")

    def chat(history: list[Any], **fields: Any) -> Any:
        body = {"model": str(model), "messages": history, "tools": [TOOL], "max_tokens": 8}
        return client.chat.completions.create(**(body | fields))

    history: list[Any] = [{"role": "user", "content": "Hi"}]
    first = chat(history, parallel_tool_calls=False)
    history += [first.choices[0].message, {"role": "user", "content": "And then?"}]
    chat(history, n=2)
    list(chat(history, stream=True, temperature=0.5))
    held = chat(history, max_tokens=200, response_format=schema_format(ANSWER))
    for no_schema in ({"type": "nonsense"}, {"$ref": "#/$defs/nothing"}, {"pattern": "(a"}):
        with pytest.raises(BadRequestError):
            chat(history, response_format=schema_format({"type": "string"} | no_schema))
    response = client.responses.create(model="policy", input="Hi", max_output_tokens=8)
    client.responses.create(
        model="policy",
        input="So?",
        previous_response_id=response.id,
        max_output_tokens=8,
    )
    answer: dict[str, Any] = json.loads(held.choices[0].message.content)
    return answer


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_sessions_of_a_served_model_are_rows_and_are_sampled_again_by_their_requests(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    model = write_tiny_model(tmp_path / "tiny", family="olmo2")
    rows = tmp_path / "sessions.jsonl"
    with serving(model, rows, max_seq_length=512) as url:
        answer = ask(url, model)
    assert answer["answer"] in ("yes", "no") and isinstance(answer["is_sure"], bool)

    branches = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len({branch["session"] for branch in branches}) == 1
    texts = [branch["messages"][-1]["content"] for branch in branches]
    held = branches[[text.startswith("{") for text in texts].index(True)]
    # What was sampled under a grammar is in the conversation, and not among what is learned.
    assert held["sampled"]["replies"] == [[0, 8]]
    assert json.loads(held["messages"][-1]["content"]) == answer

    path = tmp_path / "sessions.requests.jsonl"
    saved = json.loads(path.read_text())
    assert [request["status"] for request in saved["requests"]] == [200] * 4 + [400] * 3 + [200] * 2
    edited = json.loads(path.read_text()) | {"session": "edited"}
    edited["requests"][2]["body"]["messages"][-1]["content"] = "And now?"
    path.write_text(f"{json.dumps(saved)}\n{json.dumps(edited)}\n")
    replay = subprocess.run(
        [sys.executable, "-m", "open_instruct.cli", "serve", str(model), "--replay", str(path)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=REPLAY_TIMEOUT_S,
    )
    assert replay.returncode == 1, replay.stderr
    assert f"session {saved['session']}: 9 requests, all equal" in replay.stdout
    difference = r"session edited: request 3 of 9 \(/v1/chat/completions\): prompt 1 .*token \d+: "
    assert re.search(difference, replay.stdout), replay.stdout
    assert "1 of 2 sessions are equal" in replay.stdout
