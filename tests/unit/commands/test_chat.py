"""`open-instruct chat` and `serve`: which model a word means, and what is said in a terminal and
through a pipe.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from open_instruct.cli import main
from open_instruct.commands import chat as chat_command
from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.serve import CPU_CACHE_BYTES, list_cpu_flags, list_server_flags
from open_instruct.commands.talking.models import find_model, find_start_model
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.resolved import write_config
from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.objectives.dpo import DPOConfig
from tests.refusals import refused

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, family="qwen3")
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """The folder of a run, as far as commands look at it, which has left a model."""
    folder = tmp_path / "run"
    folder.mkdir()
    words = [
        "--model_name_or_path",
        str(model),
        "--mixer_list",
        "r",
        "1.0",
        "--output_dir",
        str(folder),
    ]
    write_config(parse_run(DPOConfig, words), folder / "config.yaml", command="dpo")
    (folder / "hf_model").symlink_to(model)
    return folder


def likeliest_replies(model: Path, *questions: str) -> Iterator[str]:
    """By transformers' own generate, turn by turn."""
    tokenizer = load_tokenizer(str(model))
    chat = ChatFormat.choose(tokenizer, None)
    opened: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    turns: list[Any] = []
    for question in questions:
        turns.append({"role": "user", "content": question})
        prompt = torch.tensor(chat.tokenize([chat.apply(turns, add_generation_prompt=True)]))
        ids = opened.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        reply = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        turns.append({"role": "assistant", "content": reply.strip()})
        yield reply


def chat(*words: str) -> int:
    return main(["chat", *words, "--temperature", "0", "--max_new_tokens", str(NUM_TOKENS)])


def test_each_line_of_a_pipe_is_a_turn(
    model: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ("Name a prime.", "And a colour?")
    first, second = likeliest_replies(model, *questions)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(questions)))
    monkeypatch.setattr(chat_command, "escape_controls", lambda text, kept_controls: text)
    assert chat(str(run)) == 0
    said = capsys.readouterr()
    assert said.out == f"{first}\n{second}\n"
    assert said.err.count("--max_new_tokens") == 2  # both were cut


def test_second_model_answers_beside_the_first(
    run: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Name a prime."))
    assert chat(str(run), "--beside", "start") == 0
    first, second = capsys.readouterr().out.removeprefix(f"[{run}]\n").split(f"[{model}]\n")
    assert first == second != ""


def test_new_begins_another_conversation_in_a_terminal(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["Name a prime.", "", chat_command.NEW, "Name a prime.", chat_command.EXIT])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert chat(str(model)) == 0
    how_to, first, second = capsys.readouterr().out.splitlines()
    assert chat_command.NEW in how_to and first == second


def test_model_that_does_not_talk_is_refused(tmp_path: Path, run: Path) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForSequenceClassification"]})
    )
    with refused("bad_model", None, "open-instruct score"):
        find_model(str(judge))
    (run / "hf_model").unlink()
    with refused("missing_file", None, "open-instruct export"):
        find_model(str(run))
    adapter = run / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"task_type": "SEQ_CLS"}))
    with refused("bad_model", None, "SEQ_CLS"):
        find_model(str(run))


def test_adapter_is_found_with_its_base_and_served_beside_it(run: Path, model: Path) -> None:
    (run / "hf_model").unlink()
    adapter = run / "adapter"
    adapter.mkdir()
    fields = {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "r": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    found = find_model(str(run))
    assert (found.folder, found.adapter) == (model, adapter)
    words = list_server_flags(found)
    assert words[words.index("--lora-modules") + 1] == f"{run}={adapter}"
    assert words[words.index("--max-lora-rank") + 1] == "4"
    assert find_start_model(str(run)).folder == model
    with refused("conflict", "beside", "start"):
        find_start_model(str(model))


def test_server_on_a_cpu_does_not_take_all_memory_unless_told_to() -> None:
    assert list_cpu_flags([])[:2] == ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
    assert list_cpu_flags(["--gpu_memory_utilization=0.5", "--dtype", "bfloat16"]) == [
        "--enforce-eager"
    ]


@pytest.mark.parametrize(
    "words", [["chat"], ["chat", "--seed", "1"], ["serve"], ["serve", "--port", "1"]]
)
def test_first_word_is_a_model(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "the first word is a run" in capsys.readouterr().err


def test_conversation_that_became_too_long_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 5000))
    with pytest.raises(InputError, match="/new"):
        chat_command.main([str(model), "--temperature", "0"])


@pytest.fixture
def vllm_within_this_process() -> Iterator[None]:
    """An engine leaves its process group, with which no test after it could have another one."""
    pytest.importorskip("vllm")
    from vllm.distributed import parallel_state

    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.extended
@pytest.mark.usefixtures("vllm_within_this_process")
def test_vllm_gives_the_same_reply(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = []
    for engine in ("transformers", "vllm"):
        monkeypatch.setattr("sys.stdin", io.StringIO("Name a prime."))
        assert chat(str(model), "--engine", engine) == 0
        replies.append(capsys.readouterr().out)
    assert replies[0] == replies[1]
