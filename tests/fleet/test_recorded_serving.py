"""`open-instruct serve --record`: a real engine behind our endpoint, and what learns from its rows.

That the ids which are learned are those that were sampled shows in the first step of each run: the
start model is the one that was served, so its log-probs must be the recorded ones.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from open_instruct.cli import main
from open_instruct.commands.tiny_model import write_tiny_model
from tests.fleet.grpo_case import GRPOCase, finished, started
from tests.ranks.fork_server import REPOSITORY
from tests.waiting import eventually

pytestmark = pytest.mark.extended
Row = dict[str, Any]
NUM_TOKENS, NUM_SESSIONS = 8, 4
SMALL = ["--param_dtype", "float32", "--max_train_steps", "1", "--per_device_train_batch_size", "4"]


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def serving(model: Path, rows: Path, *, max_seq_length: int = 128) -> Iterator[str]:
    """The address of a server that records; leaving the block ends it."""
    log = rows.with_name("log")
    flags = ["--record", str(rows), "--port", "0", "--max_seq_length", str(max_seq_length)]
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
        yield found[1]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def post(address: str, key: str, body: Any) -> Row:
    request = urllib.request.Request(
        address,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: Row = json.load(answer)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="needs vLLM")
    return write_tiny_model(tmp_path_factory.mktemp("served") / "tiny", family="olmo2")


@pytest.fixture(scope="module")
def sessions(model: Path) -> Path:
    """Sessions of one prompt and two turns, each with another reward, and one without, of JSON."""
    path = model.with_name("sessions.jsonl")
    with serving(model, path) as address:
        for number in range(NUM_SESSIONS):
            history = [{"role": "user", "content": "Hi"}]
            for _ in range(2):
                question = {"model": str(model), "messages": history, "max_tokens": NUM_TOKENS}
                reply = post(f"{address}/chat/completions", f"key {number}", question)
                history += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
            post(f"{address}/session/end", f"key {number}", {"reward": float(number)})
        question = {"model": str(model), "messages": history[:1], "max_tokens": NUM_TOKENS}
        question["response_format"] = {"type": "json_object"}
        reply = post(f"{address}/chat/completions", "mine", question)
        # Held to JSON, which random weights may not end in time.
        assert reply["choices"][0]["message"]["content"].strip().startswith("{")
    return path


def average_logprobs(row: Row, reply: int | None = None) -> float:
    """The mean of the recorded log-probs of a row, or of one of its replies."""
    sampled = row["sampled"]
    logprobs = sampled["logprobs"]
    if reply is not None:
        lengths = [stop - start for start, stop in sampled["replies"]]
        first = sum(lengths[:reply])
        logprobs = logprobs[first : first + lengths[reply]]
    return fmean(logprobs)


def train(objective: str, model: Path, rows: Path, folder: Path) -> Row:
    """The metrics of the one step of an offline run."""
    out = folder / "out"
    words = ["--model_name_or_path", str(model), "--mixer_list", str(rows), "1.0", *SMALL]
    words += ["--output_dir", str(out), "--cache_dir", str(folder / "cache")]
    script = str(REPOSITORY / "open_instruct" / f"{objective}.py")
    finished(started([script, *words], cwd=folder), exit_code=0)
    (row,) = read_rows(out / "metrics.jsonl")
    return row


def test_sessions_are_rows_with_the_rewards_that_their_clients_gave(sessions: Path) -> None:
    *rewarded, last = read_rows(sessions)
    assert [row["reward"] for row in rewarded] == [0.0, 1.0, 2.0, 3.0] and "reward" not in last
    assert len({row["session"] for row in (*rewarded, last)}) == NUM_SESSIONS + 1
    for row in rewarded:
        assert len(row["sampled"]["replies"]) == 2 and len(row["messages"]) == 4
    assert last["sampled"]["replies"] == []
    assert "key" not in sessions.read_text()


def test_sft_learns_the_replies_of_the_best_session(
    model: Path, sessions: Path, tmp_path: Path
) -> None:
    best = tmp_path / "best.jsonl"
    assert main(["sessions", str(sessions), "--best", str(best)]) == 0
    (row,) = read_rows(best)
    assert row["reward"] == 3.0
    metrics = train("sft", model, best, tmp_path)
    assert metrics["loss"] == pytest.approx(-average_logprobs(row), abs=1e-4)


def test_dpo_learns_the_replies_by_which_sessions_differ(
    model: Path, sessions: Path, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    assert main(["sessions", str(sessions), "--pairs", str(pairs)]) == 0
    worst, *_, best = read_rows(sessions)[:NUM_SESSIONS]
    metrics = train("dpo", model, pairs, tmp_path)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["logps/chosen"] == pytest.approx(average_logprobs(best, 0), abs=1e-4)
    assert metrics["logps/rejected"] == pytest.approx(average_logprobs(worst, 0), abs=1e-4)


def test_grpo_learns_off_policy_from_the_recorded_ids_and_log_probs(
    model: Path, sessions: Path, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.jsonl"
    assert main(["sessions", str(sessions), "--groups", str(groups)]) == 0
    case = GRPOCase(
        model=model,
        prompts=groups,
        output_dir=tmp_path / "out",
        flags={
            "num_unique_prompts_rollout": 1,
            "total_episodes": 2 * NUM_SESSIONS,
            "response_length": 96,
            "learning_rate": "1e-2",
        },
    )
    case.run()
    first, second = case.rows()
    num_tokens = sum(len(row["sampled"]["logprobs"]) for row in read_rows(sessions))
    for row in (first, second):
        assert row["reward"] == row["verifier/recorded"] == 1.5
        assert row["num_generated_tokens"] == num_tokens and row["grad_norm"] > 0
    # The model that was served, and then one that has moved away from it.
    assert first["logprob_diff/max"] < 1e-4 and first["rho/max"] == pytest.approx(1, abs=1e-4)
    assert second["logprob_diff/max"] > 10 * first["logprob_diff/max"]
