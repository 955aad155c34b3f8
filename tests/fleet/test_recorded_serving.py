"""`open-instruct serve --record`: a real engine behind our endpoint, and the rows that it leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from open_instruct.commands.tiny_model import write_tiny_model
from tests.ranks.fork_server import REPOSITORY
from tests.waiting import eventually

pytestmark = pytest.mark.extended


def test_model_is_served_and_its_sessions_are_rows(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    model = write_tiny_model(tmp_path / "tiny", family="olmo2")
    rows = tmp_path / "sessions.jsonl"
    log = tmp_path / "log"
    flags = ["--record", str(rows), "--port", "0", "--max_seq_length", "128"]
    command = [sys.executable, "-m", "open_instruct.cli", "serve", str(model), *flags]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=file, stderr=file
        )
    try:
        eventually(
            lambda: re.search(r"(http\S+) answers", log.read_text()) or server.poll() is not None,
            what="it does not answer",
        )
        found = re.search(r"(http\S+) answers", log.read_text())
        assert found is not None, log.read_text()
        for body in ({"max_tokens": 8}, {"response_format": {"type": "json_object"}}):
            question = {"model": str(model), "messages": [{"role": "user", "content": "Hi"}]}
            request = urllib.request.Request(
                f"{found[1]}/chat/completions",
                json.dumps(question | body).encode(),
                {"Authorization": "Bearer mine", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                reply = json.load(answer)["choices"][0]["message"]["content"]
        # The second is held to JSON, which random weights may not end in time.
        assert reply.strip().startswith("{")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    first, second = (json.loads(line) for line in rows.read_text().splitlines())
    assert first["session"] == second["session"]
    assert first["sampled"]["replies"] == [[0, 8]] and second["sampled"]["replies"] == []
    assert second["messages"][-1]["content"] == reply
