"""`--on_bad_row trim`: conversations that begin with a reply are read from the user's turn on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.prompts import PromptBuilder
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.sft_rows import ReplyBuilder, SFTBuilder
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.objectives.kto_rows import UnpairedBuilder
from open_instruct.rewards.answers import Passthrough
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, load_rows, marked, turns, write_rows

TOOL_CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
SCHEMA = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def sharegpt(*turns: str) -> dict[str, Any]:
    """A row of turns such as "gpt Hello"."""
    parts = [turn.partition(" ") for turn in turns]
    return {"conversations": [{"from": name, "value": text} for name, _, text in parts]}


def load(path: Path, tokenizer: Any, how: str, builder: Any = SFTBuilder, **more: Any) -> Any:
    return load_rows(
        partial(load_token_dataset, builder),
        path,
        "1.0",
        tokenizer=tokenizer,
        template="simple_chat",
        on_bad_row=how,
        cache_dir=path.parent / "cache",
        **(more or {"max_seq_length": 999}),
    )


ROWS = [
    sharegpt("human q", "gpt a"),
    sharegpt("gpt x", "human q", "gpt b"),
    sharegpt("gpt x", "gpt y", "human q", "gpt c", "human r", "gpt d"),
    sharegpt("system s", "gpt x", "human q", "gpt e"),
    {"messages": [TOOL_CALL, {"role": "tool", "content": "5"}, *turns("q", "f")]},
]
READ = ["q|a", "q|b", "q|c|r|d", "s|q|e", "q|f"]
# What stays malformed: no turn of the user follows, or another turn is out of order.
UNUSABLE = [
    sharegpt("gpt x"),
    sharegpt("system s", "gpt x"),
    sharegpt(),
    sharegpt("gpt x", "human q"),
    sharegpt("gpt x", "human q", "human r", "gpt g"),
    sharegpt("alien x", "human q", "gpt g"),
    {"messages": [{"role": "assistant", "content": "x", "tools": [SCHEMA]}, *turns("q", "g")]},
]


def test_replies_before_the_users_first_turn_are_dropped(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *ROWS, *UNUSABLE)
    dataset, report = load(path, tokenizer, "trim")
    texts = [marked(tokenizer, document) for (document,) in dataset]
    for name in ("System: ", "User: ", "\nAssistant:[ ", tokenizer.eos_token + "]", "\n"):
        texts = [text.replace(name, "|") for text in texts]
    assert ["|".join(filter(None, text.split("|"))) for text in texts] == READ
    assert sum(report.bad.values()) == len(UNUSABLE)
    # Six rows had such turns: two of them are malformed all the same.
    (warning,) = [each for each in report.warnings if "on_bad_row trim" in each]
    assert "6 rows" in warning and "rows.jsonl, line 2" in warning
    skipped, of_skipped = load(path, tokenizer, "skip")
    assert (len(skipped), sum(of_skipped.bad.values())) == (1, len(ROWS) - 1 + len(UNUSABLE))
    assert not any("trim" in each for each in of_skipped.warnings)
    with refused("bad_row", None, "line 2", "--on_bad_row trim"):
        load(path, tokenizer, "error")


@pytest.mark.parametrize(
    ("builder", "row", "num_rows"),
    [
        (ReplyBuilder, {"messages": turns("x", "q", "a", "r", "b", roles="auaua")}, 2),
        (
            PreferenceBuilder,
            {
                "chosen": turns("x", "q", "a", roles="aua"),
                "rejected": turns("x", "q", "b", roles="aua"),
            },
            1,
        ),
        (UnpairedBuilder, {"messages": turns("x", "q", "a", roles="aua"), "label": True}, 1),
        (
            UnpairedBuilder,
            {
                "chosen": turns("x", "q", "a", roles="aua"),
                "rejected": turns("x", "q", "b", roles="aua"),
            },
            2,
        ),
    ],
)
def test_rows_of_other_forms_are_trimmed_too(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    builder: type[RowBuilder],
    row: dict[str, Any],
    num_rows: int,
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row)
    dataset, report = load(path, tokenizer, "trim", builder)
    assert len(dataset) == num_rows and not report.bad
    (warning,) = report.warnings
    assert "1 row " in warning
    assert "x" not in marked(tokenizer, dataset[0][0])


def test_reply_alone_of_a_pair_is_none_to_trim(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    replies = {name: turns(name, roles="a") for name in ("chosen", "rejected")}
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "q"} | replies)
    dataset, report = load(path, tokenizer, "trim", PreferenceBuilder)
    assert len(dataset) == 1 and not report.warnings


def test_prompts_are_trimmed(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    row = {"messages": turns("x", "q", roles="au"), "dataset": "passthrough"}
    builder = partial(PromptBuilder, known_verifiers={"passthrough": Passthrough()})
    path = write_rows(tmp_path / "rows.jsonl", row)
    dataset, _ = load(path, tokenizer, "trim", builder, max_prompt_token_length=99)
    assert tokenizer.decode(list(dataset[0][0].token_ids)) == "User: q\nAssistant:"
