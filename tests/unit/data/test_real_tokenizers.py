"""Tokenizers and templates that others made: ids, learned replies and exports."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.sft_rows import ReplyBuilder, SFTBuilder
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.run.generation_settings import build_export_settings
from tests.refusals import refused
from tests.unit.data.real_tokenizers import ENDS, download
from tests.unit.token_data import load_rows, write_rows

pytestmark = pytest.mark.extended

ROWS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("real_rows.yaml").read_text(encoding="utf-8")
)
# Rows that a template cannot write, or writes so that no text teaches every reply: Qwen 3's takes
# the thoughts out of earlier ones.
REFUSED = {
    **{name: ["tools"] for name in ("llama3", "llama3_1", "deepseek_v3", "gemma3", "smollm2")},
    "qwen3": ["two turns", "four turns", "tools"],
}
NO_THOUGHTS = {"qwen3": "<think>\n\n</think>\n\n"}
"""What a template writes before a reply that has no thoughts."""
TRIMMING = ("llama3", "llama3_1", "gemma3")


class Real:
    """A tokenizer's folder, and its tokenizer and template as our commands open them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = download(name)
        self.file = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(str(self.folder))
        self.chat = ChatFormat.choose(self.tokenizer, None)
        self.no_thoughts = NO_THOUGHTS.get(name, "")
        self.trims = name in TRIMMING

    def encode(self, text: str) -> list[int]:
        return list(self.file.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.file.decode(list(ids), skip_special_tokens=False))


@pytest.fixture(scope="module", params=ENDS)
def real(request: pytest.FixtureRequest) -> Real:
    return Real(request.param)


def test_ids_are_those_of_the_file(real: Real) -> None:
    texts = [message["content"] for row in ROWS.values() for message in row["messages"]]
    for text in texts:
        ids = real.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == real.encode(text), text


def test_bos_token_is_not_doubled(real: Real) -> None:
    """Every template here writes one itself, Qwen 3's tokenizer apart, which has none."""
    with refused("conflict", "add_bos"):
        ChatFormat.choose(real.tokenizer, None, add_bos=True)


def test_rows_that_a_template_cannot_write_are_refused(real: Real) -> None:
    builder = SFTBuilder(real.chat, max_seq_length=4096, on_bad_row="error")
    for name in REFUSED[real.name]:
        with pytest.raises(MalformedRow) as caught:
            builder.render(ROWS[name])
        assert caught.value.kind == "template"


def test_qwen_3_does_not_think_where_a_variable_says_so() -> None:
    real = Real("qwen3")
    chat = ChatFormat.choose(real.tokenizer, None, variables=["enable_thinking=false"])
    prompt, reply = ROWS["plain"]["messages"][-2:]
    text, (reply_text,) = chat.render([prompt], [reply])
    rendered = real.tokenizer.apply_chat_template(
        [prompt], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text == rendered and text.endswith(NO_THOUGHTS["qwen3"])
    assert reply_text == reply["content"] + ENDS["qwen3"]
    assert real.chat.render([prompt], [reply])[1] == (NO_THOUGHTS["qwen3"] + reply_text,)


def test_qwen_3_teaches_each_reply_in_a_row_of_its_own(tmp_path: Path) -> None:
    """With its thoughts, behind earlier replies without theirs, as an engine would be asked."""
    real = Real("qwen3")
    messages = [dict(message) for message in ROWS["two turns"]["messages"]]
    for message in messages[1::2]:
        message["reasoning_content"] = f"About {message['content']}"
    file = write_rows(tmp_path / "rows.jsonl", {"messages": messages}, ROWS["four turns"])
    dataset, _ = load_rows(
        partial(load_token_dataset, ReplyBuilder),
        file,
        "1.0",
        tokenizer=real.tokenizer,
        template=None,
        max_seq_length=4096,
        cache_dir=tmp_path / "cache",
    )
    assert len(dataset) == 2 + 4
    for row, place in ((0, 1), (1, 3)):
        (document,) = dataset[row]
        (span,) = document.responses
        asked = real.tokenizer.apply_chat_template(
            messages[:place], tokenize=False, add_generation_prompt=True
        )
        reply = messages[place]
        thought = f"<think>\n{reply['reasoning_content']}\n</think>\n\n"
        assert real.decode(document.token_ids[: span.start]) == asked
        assert real.decode(document.token_ids[span.start :]) == (
            thought + reply["content"] + ENDS["qwen3"]
        )
        assert str(asked).count("About") == 0


def test_what_is_learned_is_the_reply_and_its_end(real: Real, tmp_path: Path) -> None:
    """In a text that is the start of what transformers renders, with the ids of the file."""
    rows = {name: row for name, row in ROWS.items() if name not in REFUSED[real.name]}
    file = write_rows(tmp_path / "rows.jsonl", *rows.values())
    dataset, _ = load_rows(
        partial(load_token_dataset, SFTBuilder),
        file,
        "1.0",
        tokenizer=real.tokenizer,
        template=None,
        max_seq_length=4096,
        cache_dir=tmp_path / "cache",
    )
    documents = {tuple(document.token_ids): document for (document,) in dataset}
    assert len(dataset) == len(rows)
    for name, row in rows.items():
        rendered = real.tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False
        )
        end = ENDS[real.name]
        ids = real.encode(str(rendered)[: str(rendered).rindex(end) + len(end)])
        document = documents[tuple(ids)]
        replies = [each["content"] for each in row["messages"] if each["role"] == "assistant"]
        learned = [ids[span.start : span.stop] for span in document.responses]
        texts = [real.decode(each) for each in learned]
        assert len(texts) == len(replies), name
        for text, reply in zip(texts, replies, strict=True):
            written = reply.strip() if real.trims else reply
            assert text.removeprefix(real.no_thoughts) == real.decode(real.encode(written + end)), (
                name
            )


def test_export_has_the_same_ids_and_ends_turns(real: Real, tmp_path: Path) -> None:
    """As transformers opens the tokenizer that stands beside exported weights."""
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = build_export_settings(tmp_path, real.folder, real.tokenizer, real.chat)
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((real.folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings["tokenizer_config"]))
    opened: Any = AutoTokenizer.from_pretrained(folder)
    for row in ROWS.values():
        for message in row["messages"]:
            ids = opened(message["content"], add_special_tokens=False)["input_ids"]
            assert ids == real.encode(message["content"])
    ends = settings["generation_config"]["eos_token_id"]
    end_id = real.file.token_to_id(ENDS[real.name])
    assert end_id in (ends if isinstance(ends, list) else [ends])
