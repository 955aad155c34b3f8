"""What an export is for: vLLM's server, asked as OpenAI's is, and lm-eval where that is installed
(docs/after.md).
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check
from open_instruct.rewards.judge import JUDGE_COSTS
from open_instruct.rewards.pool import VerifierPool
from tests.ranks.train_case import free_ports
from tests.unit.scored import completion_of

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
QUESTION = "What is 2 + 2?"
NUM_TOKENS = 12

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that is not the tokenizer's own."""
    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "hf_model", family="olmo2")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}asked: {{ message.content }}{% endfor %} so"
    )
    return folder


@pytest.fixture(scope="module")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("vllm", reason="needs vLLM")
    (port,) = free_ports(1)
    tmp_path = tmp_path_factory.mktemp("server")
    program = str(REPOSITORY / "tests" / "fleet" / "openai_server.py")
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, program, str(model), str(port)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        server = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + TIMEOUT_S
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None, (
                    tmp_path / "log"
                ).read_text()[-4000:]
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def test_vllm_serves_an_export(model: Path, address: str) -> None:
    """And says what transformers goes on with, behind the export's own chat template."""
    asked = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps({"model": "mine"} | asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        reply: dict[str, Any] = json.load(answer)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    encoded = tokenizer.apply_chat_template(
        asked["messages"], return_tensors="pt", return_dict=True
    )
    ids = network.generate(**encoded, do_sample=False, max_new_tokens=NUM_TOKENS)[
        0, encoded["input_ids"].shape[1] :
    ]
    assert reply["choices"][0]["message"]["content"] == tokenizer.decode(
        ids, skip_special_tokens=True
    )
    assert reply["usage"]["completion_tokens"] == len(ids) == NUM_TOKENS


def test_lm_eval_scores_an_export(model: Path, tmp_path: Path) -> None:
    """By the command of the docs, on a task of two rows that needs no network."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    rows = [{"question": "1 + 1 =", "answer": 0}, {"question": "1 + 2 =", "answer": 1}]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{tmp_path}/sums.jsonl"}},
    }
    task |= {"test_split": "test", "output_type": "multiple_choice", "doc_to_choice": ["2", "3"]}
    task |= {
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    words = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32",
        "--apply_chat_template",
    ]
    words += [
        "--tasks",
        "sums",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "scores"),
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }
    subprocess.run(
        [sys.executable, "-m", "lm_eval", *words],
        env=environment,
        check=True,
        timeout=300,
        cwd=tmp_path,
    )
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    told = json.loads(scores.read_text())
    assert told["results"]["sums"]["acc,none"] in (0.0, 0.5, 1.0)
    assert told["chat_template"] == (model / "chat_template.jinja").read_text()


def test_served_model_judges(address: str, tmp_path: Path) -> None:
    """One of random weights, which would never answer so by itself, is held to the verdicts."""
    (tmp_path / "short.txt").write_text("Good?\n{output}")
    flags = RewardSection(
        llm_judge_model="mine",
        llm_judge_url=f"{address}/v1",
        llm_judge_prompt=f"{tmp_path}/short.txt",
        llm_judge_max_tokens=16,
    )
    pool = VerifierPool(flags)
    pool.verifiers["judge"].begin_run(tmp_path)
    before = dict(JUDGE_COSTS)
    completions = [completion_of(text) for text in ("yes", "no", "5")]
    outcomes = pool.score(Check(verifier="judge", ground_truth=None), "", completions)
    assert [outcome.problem for outcome in outcomes] == [None] * 3
    assert {outcome.score for outcome in outcomes} <= {tenth / 10 for tenth in range(11)}
    cost = {
        name: JUDGE_COSTS[f"judge/{name}"] - before[f"judge/{name}"]
        for name in ("requests", "completion_tokens")
    }
    assert cost["requests"] == 3 and 3 <= cost["completion_tokens"] <= 3 * 16
    flags.llm_judge_model = "another"
    with pytest.raises(InputError, match=r"NotFoundError.*does not exist"):
        VerifierPool(flags).verifiers["judge"].begin_run(tmp_path)
