"""Forms of rows and what each of them teaches, token by token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.prompts import load_prompt_dataset
from open_instruct.data.report import DataReport
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.errors import InputError
from open_instruct.objectives.kto_rows import UnpairedBuilder
from open_instruct.toys.tiny import train_tokenizer

BUILDERS = {"sft": SFTBuilder, "pairs": PreferenceBuilder, "kto": UnpairedBuilder}


def turn(role: str, content: Any, **more: Any) -> Any:
    return {"role": role, "content": content, **more}


def said(speaker: str, value: str) -> Any:
    return {"from": speaker, "value": value}


SYSTEM, ASKED, REPLY, OTHER = turn("system", "s"), turn("user", "q"), turn("assistant", "a"), turn("assistant", "b")
AGAIN = [turn("user", "r"), turn("assistant", "c")]
HUMAN = "\n\nHuman: q\n\nAssistant:"
# In simple_chat; what stands in brackets is learned, and so is the end of its turn.
ONE, TWO = "User: q\nAssistant:[ a]", "User: q\nAssistant:[ b]"
WITH_SYSTEM = f"System: s\n{ONE}"
BOTH = f"{ONE}\nUser: r\nAssistant:[ c]"
LAST_ONLY = "User: q\nAssistant: a<eos>\nUser: r\nAssistant:[ c]"
PROMPT, PROMPT_WITH_SYSTEM = "User: q\nAssistant:", "System: s\nUser: q\nAssistant:"
JUDGED = {"ground_truth": "4", "dataset": "gsm8k"}

# What trains on the row, the row, and the texts that it becomes.
FORMS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    # Conversations.
    "messages": ("sft", {"messages": [ASKED, REPLY]}, [ONE]),
    "messages, several turns": ("sft", {"messages": [ASKED, REPLY, *AGAIN]}, [BOTH]),
    "messages, system turn": ("sft", {"messages": [SYSTEM, ASKED, REPLY]}, [WITH_SYSTEM]),
    "messages, developer": ("sft", {"messages": [turn("developer", "s"), ASKED, REPLY]}, [WITH_SYSTEM]),
    "messages, system beside": ("sft", {"messages": [ASKED, REPLY], "system": "s"}, [WITH_SYSTEM]),
    "messages, text parts": ("sft", {"messages": [turn("user", [{"type": "text", "text": "q"}]), REPLY]}, [ONE]),
    "messages, human and gpt": ("sft", {"messages": [turn("human", "q"), turn("gpt", "a")]}, [ONE]),
    "messages, weight 0": ("sft", {"messages": [ASKED, REPLY | {"weight": 0}, *AGAIN]}, [LAST_ONLY]),
    "messages, train false": ("sft", {"messages": [ASKED, REPLY | {"train": False}, *AGAIN]}, [LAST_ONLY]),
    "messages, weight 1": ("sft", {"messages": [ASKED, REPLY | {"weight": 1}, *AGAIN]}, [BOTH]),
    "messages, last weight 0": (
        "sft",
        {"messages": [ASKED, REPLY, AGAIN[0], AGAIN[1] | {"weight": 0}]},
        [ONE],
    ),
    "sharegpt": ("sft", {"conversations": [said("human", "q"), said("gpt", "a")]}, [ONE]),
    "sharegpt, system": (
        "sft",
        {"conversations": [said("human", "q"), said("gpt", "a")], "system": "s"},
        [WITH_SYSTEM],
    ),
    "sharegpt, one": ("sft", {"conversation": [said("user", "q"), said("chatgpt", "a")]}, [ONE]),
    "prompt, completion": ("sft", {"prompt": "q", "completion": "a"}, [ONE]),
    "prompt, response": ("sft", {"prompt": "q", "response": "a"}, [ONE]),
    "prompt, completion, messages": ("sft", {"prompt": [ASKED], "completion": [REPLY]}, [ONE]),
    "prompt, completion, system": ("sft", {"prompt": "q", "completion": "a", "system": "s"}, [WITH_SYSTEM]),
    "alpaca": ("sft", {"instruction": "q", "input": "", "output": "a"}, [ONE]),
    "alpaca, input": ("sft", {"instruction": "q", "input": "i", "output": "a"}, ["User: q\ni\nAssistant:[ a]"]),
    "alpaca, history": ("sft", {"instruction": "r", "output": "c", "history": [["q", "a"]]}, [BOTH]),
    "dolly": ("sft", {"instruction": "q", "response": "a"}, [ONE]),
    "openorca": ("sft", {"system_prompt": "s", "question": "q", "response": "a"}, [WITH_SYSTEM]),
    "transcript, completion": ("sft", {"prompt": HUMAN, "completion": " a"}, [ONE]),
    # Pairs.
    "pair, whole": ("pairs", {"chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, [ONE, TWO]),
    "pair, ultrafeedback": ("pairs", {"prompt": "q", "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, [ONE, TWO]),
    "pair, texts": ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}, [ONE, TWO]),
    "pair, messages": ("pairs", {"prompt": [ASKED], "chosen": [REPLY], "rejected": [OTHER]}, [ONE, TWO]),
    "pair, transcripts": ("pairs", {"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} b"}, [ONE, TWO]),
    "pair, transcript asked": ("pairs", {"prompt": HUMAN, "chosen": " a", "rejected": " b"}, [ONE, TWO]),
    "pair, prompt repeated": (
        "pairs",
        {"prompt": "q r s", "chosen": "q r s a", "rejected": "q r s b"},
        ["User: q r s\nAssistant:[ a]", "User: q r s\nAssistant:[ b]"],
    ),
    "pair, llama-factory": (
        "pairs",
        {"conversations": [said("human", "q")], "chosen": said("gpt", "a"), "rejected": said("gpt", "b")},
        [ONE, TWO],
    ),
    "pair, alpaca": ("pairs", {"instruction": "q", "chosen": "a", "rejected": "b"}, [ONE, TWO]),
    "pair, orca": ("pairs", {"question": "q", "chosen": "a", "rejected": "b"}, [ONE, TWO]),
    # Replies with a label.
    "label, texts": ("kto", {"prompt": "q", "completion": "a", "label": True}, [ONE]),
    "label, messages": ("kto", {"messages": [ASKED, REPLY], "label": 0}, [ONE]),
    "label, text of a table": ("kto", {"instruction": "q", "output": "a", "label": "True"}, [ONE]),
    "label, pairs": ("kto", {"prompt": "q", "chosen": "a", "rejected": "b"}, [ONE, TWO]),
    # Prompts.
    "asked, messages": ("prompts", {"messages": [ASKED], **JUDGED}, [PROMPT]),
    "asked, answered": ("prompts", {"messages": [ASKED, REPLY], **JUDGED}, [PROMPT]),
    "asked, text": ("prompts", {"prompt": "q", **JUDGED}, [PROMPT]),
    "asked, TRL": ("prompts", {"prompt": [SYSTEM, ASKED], **JUDGED}, [PROMPT_WITH_SYSTEM]),
    "asked, transcript": ("prompts", {"prompt": HUMAN, **JUDGED}, [PROMPT]),
    "asked, question": ("prompts", {"question": "q", "system_prompt": "s", **JUDGED}, [PROMPT_WITH_SYSTEM]),
}

# With Qwen 3's way of writing what was thought, which leaves that of earlier replies out.
THOUGHT = REPLY | {"reasoning_content": "Hm."}
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
ONE_SAID = "<user>q<assistant>[a]"
ONE_THOUGHT, TWO_THOUGHT = "<user>q<assistant>[<think>Hm.</think>a]", "<user>q<assistant>[<think>Hm.</think>b]"
THOUGHTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "messages": ("sft", {"messages": [ASKED, THOUGHT]}, [ONE_THOUGHT]),
    "messages, parts": (
        "sft",
        {"messages": [ASKED, REPLY | {"reasoning_content": [{"type": "text", "text": "Hm."}]}]},
        [ONE_THOUGHT],
    ),
    "messages, nothing thought": (
        "sft",
        {"messages": [ASKED, REPLY | {"reasoning_content": ""}]},
        [ONE_SAID],
    ),
    "sharegpt": (
        "sft",
        {"conversations": [said("human", "q"), said("gpt", "a") | {"reasoning_content": "Hm."}]},
        [ONE_THOUGHT],
    ),
    "pair": (
        "pairs",
        {"prompt": [ASKED], "chosen": [THOUGHT], "rejected": [OTHER | {"reasoning_content": "Hm."}]},
        [ONE_THOUGHT, TWO_THOUGHT],
    ),
    "pair, one thought": (
        "pairs",
        {"prompt": "q", "chosen": [THOUGHT], "rejected": "a"},
        [ONE_THOUGHT, ONE_SAID],
    ),
    "label": ("kto", {"messages": [ASKED, THOUGHT], "label": True}, [ONE_THOUGHT]),
    "label, pairs": (
        "kto",
        {"prompt": "q", "chosen": [THOUGHT], "rejected": "a"},
        [ONE_THOUGHT, ONE_SAID],
    ),
    "asked, after a reply": (
        "prompts",
        {"messages": [ASKED, THOUGHT, AGAIN[0]], **JUDGED},
        ["<user>q<assistant>a<eos><user>r<assistant>"],
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([""], vocab_size=262)


def load(
    kind: str, row: dict[str, Any], tokenizer: Any, folder: Path, *, template: str = "simple_chat"
) -> tuple[TokenDataset, DataReport]:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row))
    common: dict[str, Any] = {
        "mixer_list": [str(rows), "1.0"],
        "splits": ["train"],
        "tokenizer": tokenizer,
        "chat_template_name": template,
        "on_bad_row": "error",
        "seed": 0,
        "cache_dir": folder / "cache",
    }
    if kind == "prompts":
        prompts, report = load_prompt_dataset(known_verifiers=None, max_prompt_token_length=64, **common)
        return prompts.dataset, report
    return load_token_dataset(BUILDERS[kind], max_seq_length=128, **common)


def check(loaded: tuple[TokenDataset, DataReport], expected: list[str], tokenizer: Any) -> None:
    dataset, report = loaded
    documents = [document for index in range(len(dataset)) for document in dataset[index]]
    eos = str(tokenizer.eos_token)
    for document, text in zip(documents, expected, strict=True):
        ids: list[int] = []
        learned: list[int] = []
        for at, piece in enumerate(text.replace("<eos>", eos).replace("]", f"{eos}[").removesuffix("[").split("[")):
            piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
            learned += range(len(ids), len(ids) + len(piece_ids)) if at % 2 else ()
            ids += piece_ids
        assert list(document.token_ids) == ids
        assert [place for span in document.responses for place in range(span.start, span.stop)] == learned
    assert report.warnings == ()


@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_teaches(form: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    kind, row, expected = FORMS[form]
    check(load(kind, row, tokenizer, tmp_path), expected, tokenizer)


@pytest.mark.parametrize("form", THOUGHTS)
def test_what_was_thought_is_learned_where_the_template_writes_it(
    form: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    kind, row, expected = THOUGHTS[form]
    template = tmp_path / "thinks.jinja"
    template.write_text(THINKS)
    check(load(kind, row, tokenizer, tmp_path, template=str(template)), expected, tokenizer)


def test_a_template_that_reads_what_was_thought_and_leaves_it_out_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    template = tmp_path / "cuts.jinja"
    template.write_text(THINKS.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content[:1] }}"))
    with pytest.raises(InputError, match="leaves out part of the reasoning_content of the reply 'a'"):
        load("sft", {"messages": [ASKED, THOUGHT]}, tokenizer, tmp_path, template=str(template))


def test_what_was_thought_is_named_where_the_template_does_not_read_it(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    dataset, report = load("sft", {"messages": [ASKED, THOUGHT]}, tokenizer, tmp_path)
    assert report.warnings == ("'reasoning_content of messages' of 1 row: nothing reads what is there",)
    check((dataset, replace(report, warnings=())), [ONE], tokenizer)


def test_what_nothing_reads_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    reply = REPLY | {"reasoning_content": "Hm.", "name": None}
    row = {"messages": [ASKED, reply], "system": " ", "tools": [{"name": "f"}], "id": 3, "source": None}
    _, report = load("sft", row, tokenizer, tmp_path)
    (warning,) = report.warnings
    assert warning.endswith(" of 1 row: nothing reads what is there")
    assert set(warning.split("'")[1::2]) == {"tools", "id", "reasoning_content of messages"}
    twice = {"messages": [SYSTEM, ASKED, REPLY], "system": "another"}
    assert "'system' of 1 row" in load("sft", twice, tokenizer, tmp_path)[1].warnings[0]
    _, report = load("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "score": 3}, tokenizer, tmp_path)
    assert report.warnings == ("'score' of 1 row: nothing reads what is there",)
