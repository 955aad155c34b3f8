"""From rows of conversations to documents of which every assistant turn is learned."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.batching.documents import pack_documents
from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import EOS
from open_instruct.core.records import IGNORE_INDEX
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import Message
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.report import DataReport
from open_instruct.data.sft_rows import ReplyBuilder, SFTBuilder
from open_instruct.data.templates.chat_templates import ChatTemplate
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.objectives.registry import load_objective
from open_instruct.objectives.sft import SFT
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, chat_format, load_rows, marked, turns, write_rows

Load = Callable[..., tuple[TokenDataset, DataReport]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def load(tokenizer: Any, tmp_path: Path) -> Load:
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "template": "simple_chat",
        "cache_dir": tmp_path / "cache",
    }
    return partial(load_rows, partial(load_token_dataset, SFTBuilder), max_seq_length=128, **given)


def write(path: Path, *conversations: list[Message]) -> Path:
    return write_rows(path, *({"messages": messages} for messages in conversations))


def test_every_reply_of_a_conversation_is_learned(
    load: Load, tokenizer: Any, tmp_path: Path
) -> None:
    dataset, report = load(write(tmp_path / "rows.jsonl", turns("a", "bc", "d", "e")), "1.0")
    ((document,),) = dataset
    eos = tokenizer.eos_token
    assert (
        marked(tokenizer, document)
        == f"User: a\nAssistant:[ bc{eos}]\nUser: d\nAssistant:[ e{eos}]"
    )
    assert dataset.num_label_tokens.tolist() == [4 + 3]
    assert dataset.num_tokens.tolist() == [len(document)] == [report.num_tokens]
    assert (report.unit, report.num_kept, report.num_truncated) == ("conversation", 1, 0)


def test_labels_are_the_replies_and_nothing_else(load: Load, tmp_path: Path) -> None:
    """Packed, no label leads from one conversation into the next."""
    rows = write(tmp_path / "rows.jsonl", turns("a", "bc", "d", "e"), turns("f", "g"))
    documents = [document for (document,) in load(rows, "1.0")[0]]
    packed = pack_documents(documents)
    labels = [label for label in packed.labels_BT.flatten().tolist() if label != IGNORE_INDEX]
    replies = [
        document.token_ids[span.start : span.stop]
        for document in documents
        for span in document.responses
    ]
    assert labels == [token for reply in replies for token in reply]
    assert len(replies) == 3


@pytest.mark.parametrize(
    "name", ["simple_chat", "tulu", "zephyr", "olmo2", "olmo", "chatml", "llama3"]
)
def test_turns_end_to_end_are_the_conversation(name: str) -> None:
    special = [
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    chat = chat_format(tokenizer, name)
    messages: list[Message] = [
        {"role": "system", "content": "be kind"},
        *turns("one", "two", "three", "four"),
    ]
    pieces = chat.render_turns(messages)
    prompt, (reply,) = chat.render(messages[:-1], messages[-1:])
    assert "".join(pieces) == prompt + reply
    assert len(pieces) == 4
    assert ["two" in piece for piece in pieces] == [False, True, False, False]
    assert ["four" in piece for piece in pieces] == [False, False, False, True]
    assert chat.ends_turn(pieces[1]) and chat.ends_turn(pieces[3])


def test_template_that_rewrites_an_earlier_reply_is_refused(tokenizer: Any) -> None:
    text = (
        "{% for m in messages %}<{{ m['role'] }}>{{ '<think></think>' if m['role'] == 'assistant' "
        "and loop.last }}{{ m['content'] }}{% endfor %}{{ '<assistant>' if add_generation_prompt "
        "}}"
    )
    chat = ChatFormat(tokenizer, ChatTemplate(name="own", text=text))
    assert chat.render_turns(turns("a", "b")) == ("<user>a<assistant>", "<think></think>b")
    with pytest.raises(
        MalformedRow, match="writes an earlier reply differently before turn 4"
    ) as caught:
        chat.render_turns(turns("a", "b", "c", "d"))
    assert caught.value.kind == "template"


# As Qwen 3's, it leaves the thoughts of earlier replies out.
FORGETTING = (
    "{% for m in messages %}{{ m.role }}:{{ '(' + m.reasoning_content + ')' if "
    "m.reasoning_content and loop.last }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)


def test_replies_may_have_a_row_each(tokenizer: Any, tmp_path: Path) -> None:
    def think(messages: list[Message]) -> list[Message]:
        for message in messages[1::2]:
            message["reasoning_content"] = message["content"].upper()
        return messages

    unlearned = think(turns("i", "j", "k", "l"))
    unlearned[1] |= {"weight": 0}  # type: ignore[typeddict-item]
    conversations = [think(turns("a", "b", "c", "d")), turns("e"), unlearned]
    rows = write(tmp_path / "rows.jsonl", *conversations)
    file = tmp_path / "forgetting.jinja"
    file.write_text(FORGETTING)
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "template": str(file),
        "on_bad_row": "skip",
        "max_seq_length": 128,
        "cache_dir": tmp_path,
    }
    dataset, report = load_rows(partial(load_token_dataset, ReplyBuilder), rows, "1.0", **common)
    texts = [marked(tokenizer, document).replace(EOS, ".") for (document,) in dataset]
    assert texts == [
        "user:a.assistant:[(B)b.]",
        "user:a.assistant:b.user:c.assistant:[(D)d.]",
        "user:i.assistant:j.user:k.assistant:[(L)l.]",
    ]
    assert (report.num_rows, report.bad) == (4, {"roles_out_of_order": 1})
    # An amount counts replies, of which a half is two of four.
    half, _ = load_rows(partial(load_token_dataset, ReplyBuilder), rows, "0.5", **common)
    assert len(half) == 2 and {half.key(0), half.key(1)} < set(map(dataset.key, range(3)))
    with refused("bad_row", None, "split_replies"):
        load_rows(partial(load_token_dataset, SFTBuilder), rows, "1.0", **common)


@pytest.mark.parametrize(
    ("max_seq_length", "text", "num_tokens"),
    [
        (44, "User: a\nAssistant:[ bc<|eos|>]\nUser: d\nAssistant:[ e<|eos|>]", 44),  # all of it
        # The last reply loses its end.
        (43, "User: a\nAssistant:[ bc<|eos|>]\nUser: d\nAssistant:[ e]", 43),
        # No token of it is left, so its prompt goes too.
        (41, "User: a\nAssistant:[ bc<|eos|>]", 22),
        (20, "User: a\nAssistant:[ b]", 20),
    ],
)
def test_cut_on_the_right_after_the_last_token_that_is_learned(
    load: Load, tokenizer: Any, tmp_path: Path, max_seq_length: int, text: str, num_tokens: int
) -> None:
    rows = write(tmp_path / "rows.jsonl", turns("a", "bc", "d", "e"))
    dataset, report = load(rows, "1.0", max_seq_length=max_seq_length)
    (document,) = dataset[0]
    assert marked(tokenizer, document) == text and len(document) == num_tokens
    assert ("1 row cut to --max_seq_length" in report.lines()) == (num_tokens < 44)


def test_prompt_that_fills_the_length_is_left_out(load: Load, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", turns("a" * 200, "b"), turns("a", "b"))
    dataset, report = load(rows, "1.0")
    assert (len(dataset), report.filtered) == (1, {"prompt_too_long": 1})
    with refused("bad_row", "max_seq_length", "18"):
        load(rows, "1.0", max_seq_length=18)


def test_bad_rows_name_file_and_line(load: Load, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", turns("a", "b"), turns("c", ""))
    with refused("bad_row", None, "rows.jsonl", "line 2", "'messages'"):
        load(rows, "1.0")


# --- flags
# ----------------------------------------------------------------------------------------------

WORDS = ["--model_name_or_path", "m", "--mixer_list", "rows.jsonl", "1.0", "--output_dir", "out"]


def test_flags_are_those_of_dpo_but_for_its_loss() -> None:
    config = parse_run(SFT.config_class, [*WORDS, "--adam_beta2", "0.95"])
    assert SFT.validate(config) == []
    assert (config.optim.learning_rate, config.optim.adam_beta2) == (2e-5, 0.95)
    with refused("unknown_flag", "beta"):
        parse_run(SFT.config_class, [*WORDS, "--beta", "1"])


def test_replies_are_split_where_the_flag_says_so() -> None:
    for flags, builder in (([], SFTBuilder), (["--split_replies"], ReplyBuilder)):
        assert SFT.choose_rows(parse_run(SFT.config_class, [*WORDS, *flags])) is builder
    with refused("unknown_flag", "split_replies"):
        parse_run(load_objective("dpo").config_class, [*WORDS, "--split_replies"])


def test_only_sft_fills_rows_before_and_only_where_it_packs() -> None:
    words = [*WORDS, "--packing_strategy", "bfd"]
    assert SFT.fills_packs(parse_run(SFT.config_class, words)) and not SFT.fills_packs(
        parse_run(SFT.config_class, words[:-2])
    )
    with refused("unread_flag", "packing_strategy", "--packing"):
        SFT.validate(parse_run(SFT.config_class, [*words, "--no_packing"]))
    for name in ("dpo", "kto", "prm", "reward_model", "distill"):
        with refused("unknown_flag", "packing_strategy", "--packing"):
            parse_run(load_objective(name).config_class, words)
