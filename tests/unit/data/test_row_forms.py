"""Rows that cannot be used, each with its kind and its reason; test_what_forms_teach.py has those that can."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.messages import conversation_of, guessed_columns, prompt_of
from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.objectives.kto import parse_labelled_row
from tests.unit.token_data import turns


def said(speaker: str, value: str) -> Any:
    return {"from": speaker, "value": value}


def both(messages: Any) -> dict[str, Any]:
    return {"chosen": messages, "rejected": turns("q", "no")}


ASKED, REPLY = turns("q", "a")
OTHER = REPLY | {"content": "b"}

PAIRS = [
    ({"chosen": turns("q", "yes")}, "missing_key", "no key 'rejected'; the row has 'chosen'"),
    ({}, "missing_key", "no key 'chosen'; the row has no keys"),
    (both("yes"), "missing_key", "'chosen' is a reply alone: no key 'prompt'"),
    (both(7), "not_messages", "'chosen' must be a list of messages, not a number"),
    (both(None), "not_messages", "not null"),
    (both({"role": "user"}), "not_messages", "not an object"),
    (both([]), "not_messages", "'chosen' is an empty list"),
    (both(["q", "yes"]), "bad_message", "'chosen', turn 1: must be an object with 'role' and 'content'"),
    (both([*turns("q"), {"content": "yes"}]), "bad_message", "turn 2: no 'role'"),
    (both([*turns("q"), {"role": "assistant"}]), "bad_message", "turn 2: no 'content'"),
    (both([*turns("q"), {"role": "assistant", "content": None}]), "bad_message", "turn 2: no 'content'"),
    (both([*turns("q"), {"role": "assistant", "content": ["yes"]}]), "bad_message", "must be text, not a list"),
    (both([*turns("q"), {"role": 3, "content": "yes"}]), "bad_message", "'role' must be text, not a number"),
    (
        both([*turns("q"), {"role": "assistant", "content": "yes", "tool_calls": [{"id": 1}]}]),
        "bad_tools",
        "turn 2: a call in 'tool_calls' needs a name",
    ),
    (both([*turns("q"), {"role": "bot", "content": "yes"}]), "unknown_role", "'bot'; use system, user, assistant"),
    (both(turns("\ud83d", "yes")), "not_unicode", "turn 1: 'content' has half of a surrogate pair at character 1"),
    (both(turns("q", "  \n\t")), "empty_reply", "the reply in 'chosen' is empty"),
    (both(turns("q", "")), "empty_reply", "the reply in 'chosen' is empty"),
    (both(turns("q", " no\n")), "chosen_equals_rejected", "equals"),
    (both(turns("other", "yes")), "prompts_differ", "the prompts differ at turn 1"),
    (both(turns("q", "a", "q", "yes")), "prompts_differ", "'chosen' has 4 turns, 'rejected' has 2"),
    (both(turns("yes", roles="a")), "missing_key", "'chosen' is a reply alone: no key 'prompt'"),
    ({"prompt": "q"} | both(turns("yes", "or", roles="au")), "not_messages", "'chosen' must be one message, the reply"),
    ({"prompt": turns("q", "a")} | both("yes"), "roles_out_of_order", "turn 3: the role is 'assistant'"),
    (both(turns("q", "yes", roles="uu")), "roles_out_of_order", "turn 2: the role is 'user' where 'assistant'"),
    (both(turns("q", "s", "yes", roles="usa")), "roles_out_of_order", "turn 2: the role is 'system'"),
    (both(turns("s", "yes", roles="sa")), "roles_out_of_order", "turn 2: the role is 'assistant' where 'user'"),
    (both(turns("q", "a", "q")), "roles_out_of_order", "the last turn is 'user'"),
    (both(turns("s", roles="s")), "roles_out_of_order", "the last turn is 'system'"),
]
CONVERSATIONS: list[tuple[dict[str, Any], str, str]] = [
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
    ({"messages": [ASKED | {"content": [{"type": "image"}]}, REPLY]}, "bad_message", "must be text, not a list"),
    ({"messages": [ASKED | {"tools": ["search"]}, REPLY]}, "bad_tools", "turn 1: 'tools' are JSON schemas, not a list"),
    ({"prompt": "q", "completion": "a", "system": 3}, "bad_message", "turn 1: 'content' must be text, not a num"),
]


@pytest.mark.parametrize(
    ("parse", "row", "kind", "reason"),
    [*((parse_preference_row, *case) for case in PAIRS), *((conversation_of, *case) for case in CONVERSATIONS)],
)
def test_malformed_rows(parse: Any, row: dict[str, Any], kind: str, reason: str) -> None:
    with pytest.raises(MalformedRow) as caught:
        parse(row)
    assert (caught.value.kind, reason in caught.value.reason) == (kind, True), caught.value.reason


def test_a_transcript_of_several_turns_and_a_reply_that_only_looks_like_one() -> None:
    before = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\nwith two lines\n\nAssistant:"
    for conversation in parse_preference_row({"chosen": f"{before} a", "rejected": f"{before} b"}):
        assert [message["content"] for message in conversation[:-1]] == ["hi", "hello", "q\nwith two lines"]
    chosen, _ = parse_preference_row({"prompt": "Who?", "chosen": "Human: he", "rejected": "she"})
    assert chosen[-1]["content"] == "Human: he"


@pytest.mark.parametrize("prompt", ["another", [ASKED | {"content": "another"}], "\n\nHuman: another\n\nAssistant:"])
def test_a_prompt_that_whole_conversations_do_not_begin_with(prompt: Any) -> None:
    with pytest.raises(MalformedRow, match="'prompt' asks what 'chosen', a whole conversation, does not"):
        parse_preference_row({"prompt": prompt, "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]})


def test_a_prompt_that_replies_repeat_is_cut() -> None:
    row = {"prompt": "What is this?", "chosen": "What is this? A cat.", "rejected": "What is this?\n\nA dog."}
    chosen, rejected = parse_preference_row(row)
    assert (chosen[-1]["content"], rejected[-1]["content"]) == ("A cat.", "A dog.")
    chosen, _ = parse_preference_row(row | {"rejected": "A dog."})
    assert chosen[-1]["content"] == row["chosen"]
    short, _ = parse_preference_row({"prompt": "Yes", "chosen": "Yes, sir", "rejected": "Yes, madam"})
    assert short[-1]["content"] == "Yes, sir"


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
