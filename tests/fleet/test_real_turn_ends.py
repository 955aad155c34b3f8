"""vLLM ends a reply where a real tokenizer's template ends it, by the settings that we export.

The model can only write one token: the end of a turn. So an engine that does not stop there writes
it again and again.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.run.generation_settings import build_export_settings
from tests.unit.data.real_tokenizers import ENDS, download

REPOSITORY = Path(__file__).resolve().parents[2]
SESSION = REPOSITORY / "tests" / "fleet" / "first_tokens.py"
SESSION_TIMEOUT_S = 900

pytestmark = pytest.mark.extended


def write_model_of_one_token(folder: Path, *, vocab_size: int, token_id: int) -> None:
    """A Llama whose every hidden state is ones, and whose head knows one token."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float("norm" in name or "embed" in name))
        model.lm_head.weight[token_id] = 1.0
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A folder with all that we export beside weights, and what is right of it."""

    folder: str
    prompt_token_ids: list[int]
    end_id: int


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    root = tmp_path_factory.mktemp("turn_ends")
    return {name: export_model_of_one_token(name, root / name) for name in ENDS}


@pytest.fixture(scope="module")
def replies(
    exported: dict[str, Exported], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By folder, what an engine replies. One process has the engines, one after the other."""
    pytest.importorskip("vllm", reason="needs vLLM")
    out = tmp_path_factory.mktemp("replies") / "out.json"
    log = out.with_name("log")
    folders = [each.folder for each in exported.values()]
    with log.open("w") as said:
        done = subprocess.run(
            [sys.executable, str(SESSION), str(out), *folders],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
            timeout=SESSION_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    of_each_folder: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return of_each_folder


def export_model_of_one_token(name: str, folder: Path) -> Exported:
    source = download(name)
    tokenizer = load_tokenizer(str(source))
    chat = ChatFormat.choose(tokenizer, None)
    end_id = tokenizer.convert_tokens_to_ids(ENDS[name])
    write_model_of_one_token(folder, vocab_size=len(tokenizer), token_id=end_id)
    settings = build_export_settings(folder, source, tokenizer, chat)
    for stem in ("tokenizer_config", "generation_config"):
        (folder / f"{stem}.json").write_text(json.dumps(settings[stem]))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    text, _ = chat.render([{"role": "user", "content": "Hello?"}], [])
    prompt_token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Exported(folder=str(folder), prompt_token_ids=prompt_token_ids, end_id=end_id)


@pytest.mark.parametrize("name", ENDS)
def test_engine_stops_where_the_template_ends_a_reply(
    name: str, exported: dict[str, Exported], replies: dict[str, dict[str, Any]]
) -> None:
    expected = exported[name]
    reply = replies[expected.folder]
    assert reply["token_ids"] == [expected.end_id] and reply["finish_reason"] == "stop"
    assert reply["prompt_token_ids"] == expected.prompt_token_ids
