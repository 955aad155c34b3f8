"""Damaged traces, and chat templates that misbehave: a sentence, or a row that is counted."""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from jinja2 import TemplateError
from pyarrow import ArrowException, Table, parquet
from transformers.utils import chat_template_utils

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.data import chat
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files import unfolding
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.files.tables import open_column_file
from open_instruct.data.templates import chat_templates, template_renderer, template_trial
from open_instruct.data.templates.chat_templates import choose_chat_template
from open_instruct.data.templates.template_trial import refuse_endless
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.rl.lone_step import check_trace_fits
from open_instruct.rl.traces import read_traces, trace_file
from tests.refusals import refused
from tests.unit.mutations import mutated, mutated_bytes
from tests.unit.token_data import encoded

CONVERSATION: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]


# --- chat templates
# -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, family="llama")
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 // 0 }}",
        "{{ messages[10**400] }}",
        "{{ 'x' * 2**62 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% include '/etc/passwd' %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('\x1b[31m never') }}",
        "{{ range(10**9) | join }}",
        "{{ 'x' * (2**24 + 2**10) }}",
    ],
)
def test_template_that_fails_makes_bad_rows(
    tokenizer: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "chat_template", text)
    template = choose_chat_template(tokenizer, None)
    with pytest.raises(MalformedRow, match="chat template") as caught:
        encoded(ChatFormat(tokenizer, template), CONVERSATION)
    assert caught.value.kind == "template"
    assert caught.value.reason.isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["{% for %}", "{{ 1 | no_such_filter }}", "{% if x %}", "{{ '" + "{" * 50]
)
def test_template_that_does_not_parse_is_refused_with_its_line(
    tokenizer: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", text)
    with refused("bad_value", None, "line 1"):
        choose_chat_template(tokenizer, None)


MANY = "{% set many = range(99999) | list %}"
ENDLESS = {
    "loops": MANY + "".join(f"{{% for {name} in many %}}" for name in "abcde") + "{% endfor %}" * 5,
    "one_operation": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "while_it_is_compiled": "{{ 9 ** (9 ** 9) }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_template_without_an_end_is_refused(
    template: str, in_thread: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside the main thread, which alone Python can interrupt, and within a single
    operation.
    """
    monkeypatch.setattr(template_trial, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(template_trial, "PATIENCE", 3000)  # however busy the machine is
    # Another text in a thread: the trial of a template that has been tried is remembered.
    monkeypatch.setattr(tokenizer, "chat_template", f"{template}{{# {in_thread} #}}")

    def encode() -> None:
        encoded(ChatFormat.choose(tokenizer, None), CONVERSATION)

    before = psutil.Process().children()  # other tests' fork server, say
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(encode).result if in_thread else encode
        with pytest.raises(InputError) as caught:
            run()
    assert (caught.value.kind, caught.value.flag) == ("bad_model", "chat_template_name")
    assert psutil.Process().children() == before


def test_only_a_foreign_template_is_tried_and_once_for_each_form_of_conversation(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    refuse = chat_templates.refuse_endless

    def count(text: str, renderings: list[Any], **words: str) -> None:
        tried.append(len(renderings))
        refuse(text, renderings, **words)

    monkeypatch.setattr(chat_templates, "refuse_endless", count)
    monkeypatch.setattr(chat, "refuse_endless", count)
    encoded(ChatFormat.choose(tokenizer, "simple_chat"), CONVERSATION)
    assert tried == []
    monkeypatch.setattr(
        tokenizer, "chat_template", chat_templates.built_in_templates()["simple_chat"]
    )
    own = ChatFormat.choose(tokenizer, None)
    for answer in ("Hello.", "Good day."):
        encoded(own, [CONVERSATION[0], {"role": "assistant", "content": answer}])
    # In one process: with the prompt, with a question that asks for no reply, and with the whole.
    assert tried == [3]
    encoded(own, [{"role": "system", "content": "be brief"}, *CONVERSATION])
    assert tried == [3, 1, 1]


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ gone.away }}", "{% if %}", "{{ 'x' * 2**62 }}"]
)
def test_template_that_fails_is_no_endless_one(template: str) -> None:
    """Who renders it next meets what is raised."""
    refuse_endless(template, [{"messages": CONVERSATION}], template="own", remedy="choose another")


def test_template_that_ends_its_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = tmp_path / "killed.py"
    killed.write_text(f"import os; print({template_renderer.STARTED!r}, flush=True); os.abort()")
    monkeypatch.setattr(template_trial, "RENDERER", (sys.executable, str(killed)))
    with refused("bad_model", "chat_template_name", "SIGABRT"):
        refuse_endless("", [], template="own", remedy="choose another")


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", {}),
        (
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson "
                "}}{% endfor %}"
            ),
            {},
        ),
        ("{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}", {"tools": [{"name": "f"}]}),
        ("{{ raise_exception('no') }}", {}),
        ("{{ messages.append(1) }}", {}),
    ],
)
def test_renderer_takes_what_transformers_takes(text: str, variables: dict[str, Any]) -> None:
    given = {"messages": CONVERSATION, "tools": None, **variables}
    compiled = chat_template_utils._compile_jinja_template(text)
    ours = template_renderer.build_environment().from_string(text)
    try:
        expected = compiled.render(**given)
    except TemplateError as error:
        with pytest.raises(type(error)):
            ours.render(given)
    else:
        assert len(ours.render(given)) == len(expected)


# --- traces
# ---------------------------------------------------------------------------------------------


def trace_rows() -> list[dict[str, Any]]:
    return [
        {
            "step": 1,
            "ticket": 3,
            "sample_index": index,
            "row_id": 4,
            "prompt": "2 + 2?",
            "prompt_token_ids": [1, 2],
            "checks": json.dumps([asdict(Check(verifier="math", ground_truth="4"))]),
            "completion": "4",
            "token_ids": [5, 6],
            "logprobs": [-0.1, -0.2],
            "versions": [0, 1],
            "finish_reason": "stop",
            "seed": index,
            "reward": 1.0,
            "scores": '{"math": 1.0}',
            "problems": ["slow"],
            "advantage": 0.5,
            "used_in_training": True,
            "rejected": False,
        }
        for index in range(3)
    ]


def write_trace(run: Path, rows: Any) -> bool:
    """Whether parquet can say it at all."""
    path = trace_file(run, 1)
    path.parent.mkdir(exist_ok=True)
    try:
        parquet.write_table(Table.from_pylist(rows), path)
    except (ArrowException, TypeError, ValueError, AttributeError, OverflowError):
        return False
    return True


def test_any_trace_is_read_or_refused(tmp_path: Path) -> None:
    assert write_trace(tmp_path, trace_rows())
    assert len(read_traces(tmp_path, 1)[0].completions) == 3
    whole = trace_file(tmp_path, 1).read_bytes()
    written = refused = 0
    for seed in range(150):
        rng = random.Random(seed)
        if seed % 3 == 0:
            trace_file(tmp_path, 1).write_bytes(mutated_bytes(whole, rng))
        elif not write_trace(tmp_path, mutated(trace_rows(), rng)):
            continue
        written += 1
        try:
            groups = read_traces(tmp_path, 1)
        except InputError as error:
            refused += "step1.parquet cannot be read as a trace of ours" in str(error)
        else:
            assert all(isinstance(group.completions[0].text, str) for group in groups)
    assert written > 75
    assert refused > 25


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("token_ids", [5], "different lengths"),
        ("token_ids", [5, None], "nothing in"),
        ("token_ids", [5, -1], "token id below 0"),
        ("reward", None, "nothing in reward"),
        ("scores", "{", "Expecting"),
        ("checks", "[" * 100_000, "recursion"),
        ("checks", '[{"verifier": "x"}]', "ground_truth"),
    ],
)
def test_trace_says_what_is_wrong_with_it(tmp_path: Path, name: str, value: Any, told: str) -> None:
    rows = trace_rows()
    rows[1][name] = rows[0][name] = value
    write_trace(tmp_path, rows)
    with refused("unreadable_file", None, told):
        read_traces(tmp_path, 1)


def test_trace_of_another_vocabulary_is_refused() -> None:
    completion = Completion(
        token_ids=(5, 900),
        logprobs=(-0.1, -0.2),
        versions=(0, 0),
        text="4",
        finish_reason="stop",
        seed=0,
    )
    group = RolloutGroup(
        ticket=0,
        prompt=Prompt(row_id=0, token_ids=(1,), text="", checks=()),
        completions=(completion,),
        verdicts=(Verdict(reward=1.0, scores={}),),
    )
    check_trace_fits([group], 901)
    with refused("conflict", None, "token 900", "vocab_size 900"):
        check_trace_fits([group], 900)


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": [7] * 500_000},
        {"prompt": [[7] * 500_000]},
        {"prompt": [{"a": None}] * 500_000},
    ],
    ids=["rows", "one long row", "nothing"],
)
def test_parquet_file_is_refused_by_its_declared_size(
    columns: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfolding, "ALWAYS_ALLOWED_BYTES", 2**20)
    path = tmp_path / "rows.parquet"
    parquet.write_table(Table.from_pydict(columns), path)
    assert path.stat().st_size < 4000
    with refused("unreadable_file", "mixer_list", "unfolds to 4,000,000"):
        open_column_file(path, path.name, "--mixer_list")


def test_trace_whose_texts_unfold_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row, *_) = trace_rows()
    rows = [row | {"sample_index": index, "prompt": "x" * 100_000} for index in range(50)]
    assert write_trace(tmp_path, rows) and len(read_traces(tmp_path, 1)) == 1
    monkeypatch.setattr(unfolding, "ALWAYS_ALLOWED_BYTES", 2**20)
    monkeypatch.setattr(unfolding, "MAX_TIMES_ITS_SIZE", 100)
    with refused("unreadable_file", None, "step1.parquet", "unfolds to"):
        read_traces(tmp_path, 1)
