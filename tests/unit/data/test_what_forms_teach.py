"""Forms of rows and what each of them teaches, token by token."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.prompts import load_prompt_dataset
from open_instruct.data.report import DataReport
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.errors import InputError
from open_instruct.objectives.kto import UnpairedBuilder
from open_instruct.verifiers.registry import known_verifiers
from tests.unit.token_data import byte_tokenizer, load_rows, turns, write_rows

BUILDERS = {"sft": SFTBuilder, "pairs": PreferenceBuilder, "kto": UnpairedBuilder}


def turn(role: str, content: Any, **more: Any) -> Any:
    return {"role": role, "content": content, **more}


def said(speaker: str, value: str) -> Any:
    return {"from": speaker, "value": value}


SYSTEM, ASKED, REPLY, OTHER = turns("s", "q", "a", "b", roles="suaa")
AGAIN = turns("r", "c")
HUMAN = "\n\nHuman: q\n\nAssistant:"
# In simple_chat; what stands in brackets is learned, and so is the end of its turn.
ONE, TWO = "User: q\nAssistant:[ a]", "User: q\nAssistant:[ b]"
WITH_SYSTEM = f"System: s\n{ONE}"
BOTH = f"{ONE}\nUser: r\nAssistant:[ c]"
LAST_ONLY = "User: q\nAssistant: a<eos>\nUser: r\nAssistant:[ c]"
PROMPT, PROMPT_WITH_SYSTEM = "User: q\nAssistant:", "System: s\nUser: q\nAssistant:"

# The rows, by what trains on them and the texts that each of them becomes.
FORMS: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    ("sft", ONE): {
        "messages": {"messages": [ASKED, REPLY]},
        "messages, text parts": {"messages": [turn("user", [{"type": "text", "text": "q"}]), REPLY]},
        "messages, human and gpt": {"messages": [turn("human", "q"), turn("gpt", "a")]},
        "messages, last weight 0": {"messages": [ASKED, REPLY, AGAIN[0], AGAIN[1] | {"weight": 0}]},
        "sharegpt": {"conversations": [said("human", "q"), said("gpt", "a")]},
        "sharegpt, one": {"conversation": [said("user", "q"), said("chatgpt", "a")]},
        "sharegpt, messages": {"messages": [said("user", "q"), said("chatgpt", "a")]},
        "prompt, completion": {"prompt": "q", "completion": "a"},
        "prompt, completion, null": {"prompt": "q", "completion": "a", "messages": None},
        "prompt, completion, messages": {"prompt": [ASKED], "completion": [REPLY]},
        "prompt, response": {"prompt": "q", "response": "a"},
        "alpaca": {"instruction": "q", "input": "", "output": "a"},
        "dolly": {"instruction": "q", "response": "a"},
        "transcript, completion": {"prompt": HUMAN, "completion": " a"},
    },
    ("sft", WITH_SYSTEM): {
        "messages, system turn": {"messages": [SYSTEM, ASKED, REPLY]},
        "messages, developer": {"messages": [turn("developer", "s"), ASKED, REPLY]},
        "messages, system beside": {"messages": [ASKED, REPLY], "system": "s"},
        "sharegpt, system": {"conversations": [said("human", "q"), said("gpt", "a")], "system": "s"},
        "prompt, completion, system": {"prompt": "q", "completion": "a", "system": "s"},
        "prompt, completion, one message": {"prompt": [SYSTEM, ASKED], "completion": REPLY},
        "openorca": {"system_prompt": "s", "question": "q", "response": "a"},
    },
    ("sft", BOTH): {
        "messages, several turns": {"messages": [ASKED, REPLY, *AGAIN]},
        "messages, weight 1": {"messages": [ASKED, REPLY | {"weight": 1}, *AGAIN]},
        "alpaca, history": {"instruction": "r", "output": "c", "history": [["q", "a"]]},
    },
    ("sft", LAST_ONLY): {
        "messages, weight 0": {"messages": [ASKED, REPLY | {"weight": 0}, *AGAIN]},
        "messages, train false": {"messages": [ASKED, REPLY | {"train": False}, *AGAIN]},
    },
    ("sft", "User: q\ni\nAssistant:[ a]"): {"alpaca, input": {"instruction": "q", "input": "i", "output": "a"}},
    ("pairs", ONE, TWO): {
        "pair, whole": {"chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]},
        "pair, ultrafeedback": {"prompt": "q", "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]},
        "pair, whole, messages": {"prompt": [ASKED], "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]},
        "pair, texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
        "pair, messages": {"prompt": [ASKED], "chosen": [REPLY], "rejected": [OTHER]},
        "pair, mixed": {"prompt": [ASKED], "chosen": "a", "rejected": [OTHER]},
        "pair, messages that ask": {"messages": [ASKED], "chosen": REPLY, "rejected": OTHER},
        "pair, transcripts": {"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} b"},
        "pair, transcript asked": {"prompt": HUMAN, "chosen": " a", "rejected": " b"},
        "pair, transcripts and theirs": {"prompt": HUMAN, "chosen": f"{HUMAN} a", "rejected": f"{HUMAN} b"},
        "pair, llama-factory": {
            "conversations": [said("human", "q")],
            "chosen": said("gpt", "a"),
            "rejected": said("gpt", "b"),
        },
        "pair, alpaca": {"instruction": "q", "chosen": "a", "rejected": "b"},
        "pair, orca": {"question": "q", "chosen": "a", "rejected": "b"},
    },
    ("pairs", WITH_SYSTEM, f"System: s\n{TWO}"): {
        "pair, system turn": {"chosen": [SYSTEM, ASKED, REPLY], "rejected": [SYSTEM, ASKED, OTHER]}
    },
    ("pairs", "User: q r s\nAssistant:[ a]", "User: q r s\nAssistant:[ b]"): {
        "pair, prompt repeated": {"prompt": "q r s", "chosen": "q r s a", "rejected": "q r s b"}
    },
    ("kto", ONE): {
        "label, texts": {"prompt": "q", "completion": "a", "label": True},
        "label, messages": {"messages": [ASKED, REPLY], "label": 0},
        "label, text of a table": {"instruction": "q", "output": "a", "label": "True"},
    },
    ("kto", ONE, TWO): {"label, pairs": {"prompt": "q", "chosen": "a", "rejected": "b"}},
    ("prompts", PROMPT): {
        "asked, messages": {"messages": [ASKED]},
        "asked, answered": {"messages": [ASKED, REPLY]},
        "asked, sharegpt": {"conversations": [said("human", "q"), said("gpt", "a")]},
        "asked, text": {"prompt": "q"},
        "asked, transcript": {"prompt": HUMAN},
    },
    ("prompts", PROMPT_WITH_SYSTEM): {
        "asked, TRL": {"prompt": [SYSTEM, ASKED]},
        "asked, question": {"question": "q", "system_prompt": "s"},
    },
    ("prompts", "User: q\ni\nAssistant:"): {"asked, alpaca": {"instruction": "q", "input": "i"}},
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
THINKING = {"reasoning_content": "Hm."}
THOUGHTS: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    ("sft", ONE_THOUGHT): {
        "messages": {"messages": [ASKED, THOUGHT]},
        "messages, parts": {"messages": [ASKED, REPLY | {"reasoning_content": [{"type": "text", "text": "Hm."}]}]},
        "sharegpt": {"conversations": [said("human", "q"), said("gpt", "a") | THINKING]},
    },
    ("sft", ONE_SAID): {"nothing thought": {"messages": [ASKED, REPLY | {"reasoning_content": ""}]}},
    ("pairs", ONE_THOUGHT, TWO_THOUGHT): {
        "pair": {"prompt": [ASKED], "chosen": [THOUGHT], "rejected": [OTHER | THINKING]}
    },
    ("pairs", ONE_THOUGHT, ONE_SAID): {"pair, one": {"prompt": "q", "chosen": [THOUGHT], "rejected": "a"}},
    ("kto", ONE_THOUGHT): {"label": {"messages": [ASKED, THOUGHT], "label": True}},
    ("kto", ONE_THOUGHT, ONE_SAID): {"label, pairs": {"prompt": "q", "chosen": [THOUGHT], "rejected": "a"}},
    ("prompts", "<user>q<assistant>a<eos><user>r<assistant>"): {
        "asked, after a reply": {"messages": [ASKED, THOUGHT, AGAIN[0]]}
    },
}


def cases(forms: dict[tuple[str, ...], dict[str, dict[str, Any]]]) -> list[Any]:
    """A case for each row."""
    cases = []
    for (kind, *expected), rows in forms.items():
        more = {"ground_truth": "4", "dataset": "gsm8k"} if kind == "prompts" else {}
        cases += [pytest.param(kind, row | more, expected, id=name) for name, row in rows.items()]
    return cases


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def load(
    kind: str, row: dict[str, Any], tokenizer: Any, folder: Path, *, template: str = "simple_chat"
) -> tuple[TokenDataset, DataReport]:
    given: dict[str, Any] = {"tokenizer": tokenizer, "template": template, "cache_dir": folder / "cache"}
    rows = write_rows(folder / "rows.jsonl", row)
    if kind == "prompts":
        load_one = partial(
            load_prompt_dataset, known_verifiers=known_verifiers(RewardSection()), max_prompt_token_length=64
        )
        prompts, report = load_rows(load_one, rows, "1.0", **given)
        return prompts.dataset, report
    load_one = partial(load_token_dataset, BUILDERS[kind], max_seq_length=128)
    loaded: tuple[TokenDataset, DataReport] = load_rows(load_one, rows, "1.0", **given)
    return loaded


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
    assert report.warnings == []


@pytest.mark.parametrize(("kind", "row", "expected"), cases(FORMS))
def test_what_a_form_teaches(kind: str, row: Any, expected: list[str], tokenizer: Any, tmp_path: Path) -> None:
    check(load(kind, row, tokenizer, tmp_path), expected, tokenizer)


@pytest.mark.parametrize(("kind", "row", "expected"), cases(THOUGHTS))
def test_what_was_thought_is_learned_where_the_template_writes_it(
    kind: str, row: Any, expected: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text(THINKS)
    check(load(kind, row, tokenizer, tmp_path, template=str(template)), expected, tokenizer)


def test_a_template_that_reads_what_was_thought_and_leaves_it_out_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    template = tmp_path / "cuts.jinja"
    template.write_text(THINKS.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content[:1] }}"))
    with pytest.raises(InputError, match="leaves out part of the reasoning_content of the reply 'a'"):
        load("sft", {"messages": [ASKED, THOUGHT]}, tokenizer, tmp_path, template=str(template))


def test_what_was_thought_is_named_where_the_template_does_not_read_it(tokenizer: Any, tmp_path: Path) -> None:
    dataset, report = load("sft", {"messages": [ASKED, THOUGHT]}, tokenizer, tmp_path)
    assert report.warnings == ["'reasoning_content of messages' of 1 row: nothing reads what is there"]
    check((dataset, replace(report, warnings=[])), [ONE], tokenizer)


def test_what_nothing_reads_is_named(tokenizer: Any, tmp_path: Path) -> None:
    reply = REPLY | {"reasoning_content": "Hm.", "name": None}
    row = {"messages": [ASKED, reply], "system": " ", "tools": ["f"], "id": 3, "source": None}
    _, report = load("sft", row, tokenizer, tmp_path)
    (warning,) = report.warnings
    assert warning.endswith(" of 1 row: nothing reads what is there")
    assert set(warning.split("'")[1::2]) == {"tools", "id", "reasoning_content of messages"}
    twice = {"messages": [SYSTEM, ASKED, REPLY], "system": "another"}
    assert "'system' of 1 row" in load("sft", twice, tokenizer, tmp_path)[1].warnings[0]
    _, report = load("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "score": 3}, tokenizer, tmp_path)
    assert report.warnings == ["'score' of 1 row: nothing reads what is there"]
