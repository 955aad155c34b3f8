"""Rows with the ids that their replies were sampled with, which are learned as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import MixerEntry
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.sft_rows import ReplyBuilder, SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from tests.unit.data.test_chat import CHATML, make_tokenizer

Row = dict[str, Any]


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    tokenizer: PreTrainedTokenizerFast = make_tokenizer(CHATML)
    return ChatFormat.choose(tokenizer, "chatml")


def spell(chat: ChatFormat, text: str) -> list[int]:
    """The ids of a text, letter by letter: no tokenizer with merges would write it so."""
    return [token_id for letter in text for token_id in chat.tokenize([letter])[0]]


def make_branch_row(chat: ChatFormat) -> Row:
    """Two replies; the first was sampled letter by letter, and the second was cut."""
    (prompt,) = chat.tokenize(["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"])
    first = [*spell(chat, "yes"), chat.turn_end_token_ids()[-1]]
    between = chat.tokenize(["\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"])[0]
    last = spell(chat, "so")
    starts = len(first) + len(between)
    return {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": "so"},
        ],
        "session": "a",
        "sampled": {
            "chat_format": chat.fingerprint,
            "temperature": 1.0,
            "top_p": 1.0,
            "prompt_token_ids": prompt,
            "token_ids": [*first, *between, *last],
            "replies": [[0, len(first)], [starts, starts + len(last)]],
            "numbers": [0, 1],
            "turns": [1, 3],
            "logprobs": [-0.5] * (len(first) + len(last)),
            "is_cut": True,
        },
    }


def load(
    chat: ChatFormat, folder: Path, builder: Callable[..., RowBuilder], *rows: Row, **arguments: Any
) -> tuple[TokenDataset, DataReport]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_token_dataset(
        builder,
        entries=[MixerEntry(name=str(path), amount=1.0, split="train")],
        chat=chat,
        on_bad_row="error",
        seed=0,
        cache_dir=folder,
        max_seq_length=arguments.pop("max_seq_length", 500),
    )


@pytest.mark.parametrize("builder", [SFTBuilder, ReplyBuilder])
def test_sft_learns_the_sampled_ids_of_replies_alone(
    chat: ChatFormat, tmp_path: Path, builder: type[SFTBuilder]
) -> None:
    row = make_branch_row(chat)
    dataset, report = load(chat, tmp_path, builder, row)
    (document,) = dataset[0]
    sampled = row["sampled"]
    num_prompt = len(sampled["prompt_token_ids"])
    assert document.token_ids == (*sampled["prompt_token_ids"], *sampled["token_ids"])
    spans = [[span.start - num_prompt, span.stop - num_prompt] for span in document.responses]
    assert len(dataset) == 1 and spans == sampled["replies"]
    assert any("1 learned part given as ids" in warning for warning in report.warnings)
    assert any("'session'" in warning for warning in report.warnings)  # which nothing reads


def test_sampled_ids_are_cut_as_others_are(chat: ChatFormat, tmp_path: Path) -> None:
    row = make_branch_row(chat)
    room = len(row["sampled"]["prompt_token_ids"]) + 2
    dataset, report = load(chat, tmp_path, SFTBuilder, row, max_seq_length=room)
    (document,) = dataset[0]
    assert len(document) == room and document.num_label_tokens == 2 and report.num_truncated == 1


def edit_reply(row: Row) -> None:
    row["messages"][1]["content"] = "no"


def shorten_reply(row: Row) -> None:
    row["messages"][1]["content"] = "ye"


def name_another_format(row: Row) -> None:
    row["sampled"]["chat_format"] = "another"


def drop_replies(row: Row) -> None:
    row["sampled"].update(replies=[], numbers=[], turns=[], logprobs=[])


def drop_logprob(row: Row) -> None:
    row["sampled"]["logprobs"].pop()


def add_field(row: Row) -> None:
    row["sampled"]["new"] = 1


def mistype_ids(row: Row) -> None:
    row["sampled"]["token_ids"][0] = "1"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (edit_reply, "edited_reply"),
        (shorten_reply, "edited_reply"),
        (name_another_format, "other_chat_format"),
        (drop_replies, "nothing_learned"),
        (drop_logprob, "sampled"),
        (add_field, "sampled"),
        (mistype_ids, "sampled"),
    ],
)
def test_ids_that_do_not_say_what_the_row_says_are_refused(
    chat: ChatFormat, tmp_path: Path, change: Callable[[Row], None], kind: str
) -> None:
    row = make_branch_row(chat)
    change(row)
    with pytest.raises(InputError, match=kind):
        load(chat, tmp_path, SFTBuilder, row)
    del row["sampled"]
    dataset, _ = load(chat, tmp_path, SFTBuilder, row)  # as the template writes its texts
    assert len(dataset) == 1


def test_pair_learns_the_sampled_ids(chat: ChatFormat, tmp_path: Path) -> None:
    prompt = make_branch_row(chat)["sampled"]["prompt_token_ids"]
    question = {"role": "user", "content": "Hi"}
    row: Row = {
        "chosen": [question, {"role": "assistant", "content": "yes"}],
        "rejected": [question, {"role": "assistant", "content": "no"}],
        "sampled": {
            "chat_format": chat.fingerprint,
            "prompt_token_ids": prompt,
            "chosen_token_ids": spell(chat, "yes"),
            "rejected_token_ids": spell(chat, "no"),
        },
    }
    dataset, _ = load(chat, tmp_path, PreferenceBuilder, row)
    chosen, rejected = dataset[0]
    assert chosen.token_ids == (*prompt, *spell(chat, "yes"))
    assert rejected.token_ids == (*prompt, *spell(chat, "no"))
    assert [span.start for span in (*chosen.responses, *rejected.responses)] == [len(prompt)] * 2
    row["rejected"][-1]["content"] = "nope"
    with pytest.raises(InputError, match="edited_reply"):
        load(chat, tmp_path, PreferenceBuilder, row)
