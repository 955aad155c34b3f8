"""Rows of users, each with the tokens that it teaches or the reason why it cannot be used:
rows.yaml has them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.data.conversations.columns import guess_columns
from open_instruct.data.conversations.row_forms import find_conversation, find_prompt
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.preference_rows import PreferenceBuilder, parse_preference_row
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.prompts import load_prompt_dataset
from open_instruct.data.report import DataReport
from open_instruct.data.sft_rows import SFTBuilder, parse_sft_row
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.objectives.kto_rows import UnpairedBuilder, parse_labelled_row
from open_instruct.rewards.registry import known_verifiers
from tests.unit.token_data import byte_tokenizer, load_rows, turns, write_rows

BUILDERS = {"sft": SFTBuilder, "pairs": PreferenceBuilder, "kto": UnpairedBuilder}
VERIFIERS = known_verifiers(RewardSection())
PARSERS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "pairs": parse_preference_row,
    "conversations": find_conversation,
    "sft": parse_sft_row,
    "prompts": lambda row: parse_prompt_row(row, VERIFIERS, known_environments={"shop"}),
}


def expanded(value: Any) -> Any:
    """The value with every turn `{user: text}` written out."""
    if isinstance(value, list):
        return [expanded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (role := next(iter(value))) in ("user", "assistant", "system"):
        return {"role": role, "content": expanded(value[role])}
    return {key: expanded(item) for key, item in value.items()}


ROWS = expanded(
    yaml.load(
        Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader
    )
)


def taught_cases(section: str) -> Iterator[Any]:
    for form in ROWS[section]:
        for name, row in form["rows"].items():
            more = {"ground_truth": "4", "dataset": "gsm8k"} if form["trains"] == "prompts" else {}
            yield pytest.param(
                form["trains"], row | more, form["texts"], id=f"{form['trains']}: {name}"
            )


def refused_cases() -> Iterator[tuple[str, Any, str, list[str]]]:
    for parser, cases in ROWS["refused"].items():
        for case in cases:
            yield parser, case["row"], case["kind"], case.get("names", [])
    # What no YAML file can hold.
    asked = {"messages": turns("q"), "dataset": "gsm8k"}
    yield (
        "pairs",
        {"chosen": turns("\ud83d", "a"), "rejected": turns("q", "b")},
        "not_unicode",
        ["turn 1", "character 1"],
    )
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\ud83d"}}}],
    }
    yield "conversations", {"messages": [*turns("q"), called]}, "not_unicode", ["'tool_calls'"]
    yield "prompts", asked | {"ground_truth": float("nan")}, "bad_ground_truth", ["JSON"]
    yield "prompts", asked | {"ground_truth": b"1"}, "bad_ground_truth", ["JSON"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def load(
    kind: str, row: dict[str, Any], tokenizer: Any, folder: Path, *, template: str = "simple_chat"
) -> tuple[TokenDataset, DataReport]:
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "template": template,
        "cache_dir": folder / "cache",
    }
    rows = write_rows(folder / "rows.jsonl", row)
    if kind == "prompts":
        load_one = partial(
            load_prompt_dataset, known_verifiers=VERIFIERS, max_prompt_token_length=64
        )
        prompts, report = load_rows(load_one, rows, "1.0", **given)
        return prompts.dataset, report
    load_one = partial(load_token_dataset, BUILDERS[kind], max_seq_length=128)
    loaded: tuple[TokenDataset, DataReport] = load_rows(load_one, rows, "1.0", **given)
    return loaded


def check(loaded: tuple[TokenDataset, DataReport], texts: list[str], tokenizer: Any) -> None:
    """The documents of the data set are the texts, and what is learned of them stands there in
    brackets.
    """
    dataset, report = loaded
    documents = [document for index in range(len(dataset)) for document in dataset[index]]
    eos = str(tokenizer.eos_token)
    for document, text in zip(documents, texts, strict=True):
        ids: list[int] = []
        learned: list[int] = []
        pieces = text.replace("<eos>", eos).replace("]", f"{eos}[").removesuffix("[").split("[")
        for place, piece in enumerate(pieces):
            piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
            learned += range(len(ids), len(ids) + len(piece_ids)) if place % 2 else ()
            ids += piece_ids
        assert list(document.token_ids) == ids
        assert [at for span in document.responses for at in range(span.start, span.stop)] == learned
    assert report.warnings == []


@pytest.mark.parametrize(("kind", "row", "texts"), taught_cases("learned"))
def test_row_of_every_form_teaches_its_replies(
    kind: str, row: Any, texts: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    check(load(kind, row, tokenizer, tmp_path), texts, tokenizer)


@pytest.mark.parametrize(("kind", "row", "texts"), taught_cases("answered"))
def test_reply_behind_a_prompt_is_left_out_with_a_warning(
    kind: str, row: Any, texts: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    dataset, report = load(kind, row, tokenizer, tmp_path)
    (warning,) = report.warnings
    assert "reply" in warning and "1 prompt" in warning
    check((dataset, replace(report, warnings=[])), texts, tokenizer)


@pytest.mark.parametrize(("parser", "row", "kind", "names"), refused_cases())
def test_malformed_row_is_refused_with_its_kind(
    parser: str, row: Any, kind: str, names: list[str]
) -> None:
    with pytest.raises(MalformedRow) as caught:
        PARSERS[parser](row)
    assert caught.value.kind == kind, caught.value.reason
    assert [name for name in names if name not in caught.value.reason] == [], caught.value.reason


# --- reasoning
# ------------------------------------------------------------------------------------------

# With Qwen 3's way of writing reasoning, which leaves that of earlier replies out.
THINKS = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.reasoning_content is string and loop.last -%}
        <assistant><think>{{ m.reasoning_content }}</think>{{ m.content }}{{ eos_token }}
    {%- elif m.role == 'assistant' -%}
        <assistant>{{ m.content }}{{ eos_token }}
    {%- else -%}
        <user>{{ m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
ASKED, REPLY = turns("q", "a")
OTHER = REPLY | {"content": "b"}
THOUGHT = REPLY | {"reasoning_content": "Hm."}


@pytest.mark.parametrize(("kind", "row", "texts"), taught_cases("thought"))
def test_reasoning_is_learned_when_the_template_writes_it(
    kind: str, row: Any, texts: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text(THINKS)
    check(load(kind, row, tokenizer, tmp_path, template=str(template)), texts, tokenizer)


def test_template_that_cuts_reasoning_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    template = tmp_path / "cuts.jinja"
    template.write_text(
        THINKS.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content[:1] }}")
    )
    with pytest.raises(InputError, match="reasoning_content") as caught:
        load("sft", {"messages": [ASKED, THOUGHT]}, tokenizer, tmp_path, template=str(template))
    assert caught.value.kind == "bad_row"


def test_reasoning_is_named_in_a_warning_when_the_template_does_not_read_it(
    tokenizer: Any, tmp_path: Path
) -> None:
    dataset, report = load("sft", {"messages": [ASKED, THOUGHT]}, tokenizer, tmp_path)
    (warning,) = report.warnings
    assert "'reasoning_content of messages' of 1 row" in warning
    check((dataset, replace(report, warnings=[])), ["User: q\nAssistant:[ a]"], tokenizer)


def test_keys_that_nothing_reads_are_named_in_a_warning(tokenizer: Any, tmp_path: Path) -> None:
    reply = REPLY | {"reasoning": "Hm.", "name": None, "refusal": "", "trainable": False}
    row = {"messages": [ASKED, reply], "system": " ", "tools": ["f"], "id": 3, "source": None}
    (warning,) = load("sft", row, tokenizer, tmp_path)[1].warnings
    unread = {"tools", "id", "reasoning of messages", "trainable of messages"}
    assert set(warning.split("'")[1::2]) == unread
    twice = {"messages": [*turns("s", roles="s"), ASKED, REPLY], "system": "another"}
    assert "'system' of 1 row" in load("sft", twice, tokenizer, tmp_path)[1].warnings[0]
    scored = {"prompt": "q", "chosen": "a", "rejected": "b", "score": 3}
    (warning,) = load("pairs", scored, tokenizer, tmp_path)[1].warnings
    assert "'score' of 1 row" in warning


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ({"from": "gpt", "value": "a", "reasoning": "Hm."}, set()),
        ({"from": "crawl", "value": 0.7}, {"from", "value"}),
        ({"from": "human", "value": "b", "reasoning": "Well."}, {"from", "value", "reasoning"}),
    ],
)
def test_turn_that_says_two_things_is_told_of(
    more: dict[str, Any], unread: set[str], tokenizer: Any, tmp_path: Path
) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text(THINKS)
    row = {"messages": [ASKED, THOUGHT | more]}
    dataset, report = load("sft", row, tokenizer, tmp_path, template=str(template))
    told = {word for warning in report.warnings for word in warning.split("'")[1::2]}
    assert told == {f"{key} of messages" for key in unread}
    texts = ["<user>q<assistant>[<think>Hm.</think>a]"]
    check((dataset, replace(report, warnings=[])), texts, tokenizer)


SAYS_WHO_IT_IS = "{% if messages[0].role != 'system' %}<system>I am.{% endif %}"


@pytest.mark.parametrize(
    ("kind", "row", "texts"),
    [
        ("sft", {"messages": [ASKED, REPLY, ASKED, OTHER]}, ["{}[a]<user>q<assistant>[b]"]),
        ("pairs", {"chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, ["{}[a]", "{}[b]"]),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": [OTHER]}, ["{}[a]", "{}[b]"]),
        ("kto", {"prompt": [ASKED], "completion": [REPLY], "label": True}, ["{}[a]"]),
        ("prompts", {"messages": [ASKED], "ground_truth": "a", "dataset": "math"}, ["{}"]),
    ],
)
def test_system_turn_of_the_template_is_written_once_and_not_learned(
    kind: str, row: dict[str, Any], texts: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    """Where a reply is rendered by itself, such a template writes its system turn into it too."""
    template = tmp_path / "says.jinja"
    template.write_text(SAYS_WHO_IT_IS + THINKS)
    begin = "<system>I am.<user>q<assistant>"
    texts = [text.format(begin) for text in texts]
    check(load(kind, row, tokenizer, tmp_path, template=str(template)), texts, tokenizer)


# --- prompts and replies
# --------------------------------------------------------------------------------


def test_transcript_of_several_turns_is_split_and_a_reply_that_looks_like_one_is_not() -> None:
    before = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\nwith two lines\n\nAssistant:"
    for conversation in parse_preference_row({"chosen": f"{before} a", "rejected": f"{before} b"}):
        assert [message["content"] for message in conversation[:-1]] == [
            "hi",
            "hello",
            "q\nwith two lines",
        ]
    chosen, _ = parse_preference_row({"prompt": "Who?", "chosen": "Human: he", "rejected": "she"})
    assert chosen[-1]["content"] == "Human: he"


@pytest.mark.parametrize(
    "prompt", ["another", [ASKED | {"content": "another"}], "\n\nHuman: another\n\nAssistant:"]
)
def test_prompt_is_refused_when_whole_conversations_begin_otherwise(prompt: Any) -> None:
    with pytest.raises(MalformedRow, match="'prompt'") as caught:
        parse_preference_row(
            {"prompt": prompt, "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}
        )
    assert caught.value.kind == "prompts_differ"


def test_prompt_is_cut_from_replies_that_both_repeat_it() -> None:
    row = {
        "prompt": "What is this?",
        "chosen": "What is this? A cat.",
        "rejected": "What is this?\n\nA dog.",
    }
    chosen, rejected = parse_preference_row(row)
    assert (chosen[-1]["content"], rejected[-1]["content"]) == ("A cat.", "A dog.")
    chosen, _ = parse_preference_row(row | {"rejected": "A dog."})
    assert chosen[-1]["content"] == row["chosen"]
    short, _ = parse_preference_row(
        {"prompt": "Yes", "chosen": "Yes, sir", "rejected": "Yes, madam"}
    )
    assert short[-1]["content"] == "Yes, sir"


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_reply_of_weight_0_is_refused_in_pairs_and_labelled_rows(key: str) -> None:
    unlearned = REPLY | {key: 0}
    for parse, row in (
        (parse_preference_row, {"prompt": "q", "chosen": unlearned, "rejected": "b"}),
        (parse_labelled_row, {"prompt": "q", "completion": unlearned, "label": True}),
    ):
        with pytest.raises(MalformedRow) as caught:
            parse(row)
        assert caught.value.kind == "nothing_learned"


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
        (
            {"prompt": "q", "choosen": "a", "rejected": "b"},
            ("prompt", "chosen", "rejected"),
            "chosen=choosen",
        ),
        ({"choosen": [{}], "rejected": [{}]}, ("prompt", "chosen", "rejected"), "chosen=choosen"),
        ({"chosen": [{}], "rejected": [{}]}, ("prompt", "completion"), ""),
    ],
)
def test_columns_are_guessed_by_known_and_like_names(
    row: Any, wanted: tuple[str, ...], guess: str
) -> None:
    assert guess_columns(row, wanted) == guess


KEYS = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "system",
]
FROM_HUMAN = {"from": "human", "value": "q"}
ANY = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=2)
    | st.sampled_from([ASKED, REPLY, FROM_HUMAN, "Human: q"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "weight", "text"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


@given(row=st.dictionaries(st.sampled_from([*KEYS, "chosen", "rejected"]), ANY, max_size=6))
def test_any_row_is_read_or_malformed(row: dict[str, Any]) -> None:
    for parse in (find_conversation, find_prompt, parse_preference_row):
        try:
            parsed: Any = parse(row)
        except MalformedRow:
            continue
        assert parsed
