"""The forms of rows that people have: all of them are the same conversation, prompt or pair."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.messages import Message
from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.data.row_forms import conversation_of, guessed_columns, prompt_of
from open_instruct.objectives.kto_rows import parse_labelled_row


def turn(role: str, content: str) -> Any:
    return {"role": role, "content": content}


def said(speaker: str, value: str) -> Any:
    return {"from": speaker, "value": value}


SYSTEM, ASKED, REPLY, OTHER = turn("system", "s"), turn("user", "q"), turn("assistant", "a"), turn("assistant", "b")
CONVERSATION: tuple[Message, ...] = (SYSTEM, ASKED, REPLY)

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [SYSTEM, ASKED, REPLY], "system": "another", "prompt": "another"},
    "messages with a system prompt": {"messages": [ASKED, REPLY], "system": "s"},
    "messages in parts": {"messages": [SYSTEM, turn("user", [{"type": "text", "text": "q"}]), REPLY]},
    "messages of a developer": {"messages": [turn("developer", "s"), ASKED, REPLY]},
    "messages of a human": {"messages": [turn("system", "s"), turn("human", "q"), turn("gpt", "a")]},
    "sharegpt": {"conversations": [said("system", "s"), said("human", "q"), said("gpt", "a")]},
    "sharegpt with a system prompt": {"conversations": [said("human", "q"), said("gpt", "a")], "system": "s"},
    "sharegpt under messages": {"messages": [said("system", "s"), said("user", "q"), said("chatgpt", "a")]},
    "texts": {"prompt": "q", "completion": "a", "system": "s", "messages": None},
    "prompt of messages": {"prompt": [SYSTEM, ASKED], "completion": [REPLY], "system": "another"},
    "one message": {"prompt": [SYSTEM, ASKED], "completion": REPLY},
    "alpaca": {"instruction": "q", "input": "", "output": "a", "system": "s"},
    "instruction and response": {"instruction": "q", "response": "a", "system": "s"},
    "prompt and response": {"prompt": "q", "response": "a", "system": "s"},
    "openorca": {"system_prompt": "s", "question": "q", "response": "a", "id": "niv.1"},
    "transcript asked": {"prompt": "\n\nHuman: q\n\nAssistant:", "completion": " a", "system": "s"},
}


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_conversations(form: str) -> None:
    assert conversation_of(CONVERSATIONS[form]) == CONVERSATION
    assert parse_labelled_row(CONVERSATIONS[form] | {"label": "False"}) == (CONVERSATION, False)
    assert prompt_of(CONVERSATIONS[form]) == CONVERSATION[:2]


def test_alpaca_with_an_input_and_a_history() -> None:
    row = {"instruction": "Add.", "input": "2 and 3", "output": "5", "history": [["hi", "hello"]]}
    assert [message["content"] for message in conversation_of(row)] == ["hi", "hello", "Add.\n2 and 3", "5"]
    assert [message["role"] for message in prompt_of(row)] == ["user", "assistant", "user"]


PAIRS: dict[str, dict[str, Any]] = {
    "whole": {"chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER], "prompt": "q"},
    "whole with a prompt of messages": {"prompt": [ASKED], "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]},
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "prompt of messages": {"prompt": [ASKED], "chosen": [REPLY], "rejected": [OTHER]},
    "mixed": {"prompt": [ASKED], "chosen": "a", "rejected": [OTHER]},
    "sharegpt": {"conversations": [said("human", "q")], "chosen": said("gpt", "a"), "rejected": said("gpt", "b")},
    "alpaca": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    "question": {"question": "q", "chosen": "a", "rejected": "b"},
    "messages that ask": {"messages": [ASKED], "chosen": REPLY, "rejected": OTHER},
    "transcript asked": {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a", "rejected": "b"},
    "transcripts beside theirs": {
        "prompt": "\n\nHuman: q\n\nAssistant:",
        "chosen": "\n\nHuman: q\n\nAssistant: a",
        "rejected": "\n\nHuman: q\n\nAssistant: b",
    },
    "parts": {"prompt": [turn("user", [{"type": "text", "text": "q"}])], "chosen": "a", "rejected": "b"},
    "transcripts": {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
}


@pytest.mark.parametrize("form", PAIRS)
def test_pairs(form: str) -> None:
    pair = parse_preference_row(PAIRS[form])
    assert (pair.prompt, pair.chosen, pair.rejected) == ((ASKED,), REPLY, OTHER)


def test_a_transcript_of_several_turns_and_a_reply_that_only_looks_like_one() -> None:
    before = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\nwith two lines\n\nAssistant:"
    pair = parse_preference_row({"chosen": f"{before} a", "rejected": f"{before} b"})
    assert [message["content"] for message in pair.prompt] == ["hi", "hello", "q\nwith two lines"]
    pair = parse_preference_row({"prompt": "Who?", "chosen": "Human: he", "rejected": "she"})
    assert pair.chosen["content"] == "Human: he"


@pytest.mark.parametrize(
    ("row", "kind", "told"),
    [
        ({"conversations": [said("alien", "q"), said("gpt", "a")]}, "unknown_role", "unknown role 'alien'"),
        ({"conversations": [said("human", "q"), {"from": "gpt"}]}, "bad_message", "'conversations', turn 2: no 'con"),
        ({"conversations": "q"}, "not_messages", "'conversations' must be a list of messages, not a string"),
        ({"instruction": 3, "output": "a"}, "bad_message", "'content' must be text, not a number"),
        ({"instruction": "q", "output": "a", "history": ["q"]}, "not_messages", "'history' must be a list of pairs"),
        ({"prompt": "q", "completion": [REPLY, OTHER]}, "not_messages", "'completion' must be one message"),
        ({"prompt": "q", "completion": 4}, "bad_message", "'content' must be text"),
        ({"prompt": "q", "completion": " "}, "empty_reply", "the reply in 'prompt + completion' is empty"),
        ({"prompt": "q", "answer": "a"}, "missing_key", "'prompt' with 'completion'"),
        ({"messages": [ASKED, REPLY | {"weight": 0.5}]}, "bad_weight", "'messages', turn 2: 'weight' must be 0 or 1"),
        ({"messages": [ASKED | {"train": True}, REPLY]}, "bad_weight", "turn 1: 'train' asks to learn a turn that"),
        ({"messages": [turn("user", [{"type": "image"}]), REPLY]}, "bad_message", "must be text, not a list"),
        ({"prompt": "q", "completion": "a", "system": 3}, "bad_message", "turn 1: 'content' must be text, not a num"),
    ],
)
def test_malformed_forms(row: dict[str, Any], kind: str, told: str) -> None:
    with pytest.raises(MalformedRow) as caught:
        conversation_of(row)
    assert (caught.value.kind, told in caught.value.reason) == (kind, True), caught.value.reason


@pytest.mark.parametrize("prompt", ["another", [turn("user", "another")], "\n\nHuman: another\n\nAssistant:"])
def test_a_prompt_that_whole_conversations_do_not_begin_with(prompt: Any) -> None:
    with pytest.raises(MalformedRow, match="'prompt' asks what 'chosen', a whole conversation, does not"):
        parse_preference_row({"prompt": prompt, "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]})


def test_a_prompt_that_replies_repeat_is_cut() -> None:
    row = {"prompt": "What is this?", "chosen": "What is this? A cat.", "rejected": "What is this?\n\nA dog."}
    pair = parse_preference_row(row)
    assert (pair.chosen["content"], pair.rejected["content"]) == ("A cat.", "A dog.")
    assert parse_preference_row(row | {"rejected": "A dog."}).chosen["content"] == row["chosen"]
    short = parse_preference_row({"prompt": "Yes", "chosen": "Yes, sir", "rejected": "Yes, madam"})
    assert short.chosen["content"] == "Yes, sir"


@pytest.mark.parametrize("key", ["weight", "train"])
def test_replies_of_pairs_and_of_labels_that_are_not_to_be_learned(key: str) -> None:
    unlearned = REPLY | {key: 0}
    with pytest.raises(MalformedRow, match="the reply in 'chosen' has weight 0 or train false"):
        parse_preference_row({"prompt": "q", "chosen": unlearned, "rejected": "b"})
    with pytest.raises(MalformedRow, match="the reply in the row has weight 0 or train false"):
        parse_labelled_row({"prompt": "q", "completion": unlearned, "label": True})


@pytest.mark.parametrize(
    ("row", "wanted", "guess"),
    [
        ({"question": "q", "answer": "a"}, ("prompt", "completion"), "completion=answer"),
        ({"query": "q", "answer": "a"}, ("prompt", "completion"), "prompt=query completion=answer"),
        ({"question": "q", "answer": "a"}, ("prompt", "ground_truth"), "ground_truth=answer"),
        (
            {"prompt": "q", "reward_model": {"ground_truth": "4"}},
            ("prompt", "ground_truth"),
            "ground_truth=reward_model.ground_truth",
        ),
        (
            {"input": "q", "winner": "a", "loser": "b"},
            ("prompt", "chosen", "rejected"),
            "prompt=input chosen=winner rejected=loser",
        ),
        ({"prompt": "q", "winner": "a"}, ("prompt", "chosen", "rejected"), ""),
    ],
)
def test_what_columns_may_mean(row: dict[str, Any], wanted: tuple[str, ...], guess: str) -> None:
    assert guessed_columns(row, wanted) == guess


KEYS = ["messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system"]
ANY = st.recursive(
    st.none() | st.integers() | st.text(max_size=2) | st.sampled_from([ASKED, REPLY, said("human", "q"), "Human: q"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "weight", "text"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(row=st.dictionaries(st.sampled_from([*KEYS, "chosen", "rejected"]), ANY, max_size=6))
def test_any_row_is_read_or_malformed(row: dict[str, Any]) -> None:
    for parse in (conversation_of, prompt_of, parse_preference_row):
        try:
            parsed: Any = parse(row)
        except MalformedRow:
            continue
        assert parsed
