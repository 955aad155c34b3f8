"""What `open-instruct preview` shows: the very tokens of a run, in the terminal and on a page."""

import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from open_instruct.commands.checks.reading_rows import find_judges
from open_instruct.commands.run_flags import parse_run
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.objectives.registry import load_objective
from open_instruct.report.preview.sample import (
    Sample,
    build_sample,
    count_by_length,
    html_page,
    print_sample,
)
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, load_rows, write_rows

REPOSITORY = Path(__file__).resolve().parents[4]
HOSTILE = "<script>alert('x')</script> & \x1b[31m \x9b31m \u202e é🙂\nsecond"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer alone: no preview needs more of a model."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"q{i} {HOSTILE}", "chosen": f"yes {HOSTILE}", "rejected": "no" * (i + 1)}
        for i in range(20)
    ]
    return write_rows(tmp_path / "pairs.jsonl", *rows)


def sample(
    name: str, model: Path, rows: Path, *words: str, num_read: int = 1000, num_shown: int = 3
) -> Sample:
    flag = "--dataset_mixer_list" if name == "grpo" else "--mixer_list"
    argv = ["--model_name_or_path", str(model), flag, str(rows), "1.0", "--output_dir", "x", *words]
    objective = load_objective(name)
    config: Any = parse_run(objective.config_class, argv)
    return build_sample(
        config, objective, find_judges(config), num_read=num_read, num_shown=num_shown
    )


def test_rows_to_train_on_are_shown_under_eval_split_and_the_others_counted(
    model: Path, pairs: Path
) -> None:
    whole, split = sample("dpo", model, pairs), sample("dpo", model, pairs, "--eval_split", "0.3")
    num_held_out = split.report.num_held_out
    assert split.report.num_pairs == 20 - num_held_out < 20 == whole.report.num_pairs
    assert any(
        f"{num_held_out} rows held out by --eval_split" in line for line in split.report.lines()
    )
    part = sample("dpo", model, pairs, "--eval_split", "0.3", num_read=10)
    assert part.report.num_pairs + part.report.num_held_out == 10 and part.report.num_held_out > 0
    assert not any("held out" in line for line in whole.report.lines())
    with refused("out_of_range", "eval_split"):  # as the run is
        sample("dpo", model, pairs, "--eval_split", "0.0001")
    with refused("out_of_range", "read"):
        sample("dpo", model, pairs, "--eval_split", "0.999", num_read=2)


def text_of(shown: Any, *, learned: bool) -> str:
    return "".join(token.text for token in shown.tokens if token.is_learned == learned)


def ids_of(shown: Any, *, learned: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(
        token_id for token in shown.tokens if token.is_learned in learned for token_id in token.ids
    )


def test_preview_shows_what_the_run_would_learn(model: Path, pairs: Path, tmp_path: Path) -> None:
    shown = sample("dpo", model, pairs)
    load = partial(
        load_token_dataset, load_objective("dpo").rows, max_seq_length=2048, cache_dir=tmp_path
    )
    dataset, report = load_rows(
        load, pairs, "1.0", tokenizer=load_tokenizer(str(model)), template=None, seed=42
    )
    assert [row.place for row in shown.rows] == [1, 11, 20]
    for row in shown.rows:
        chosen, rejected = dataset[row.place - 1]
        first, second = row.documents
        assert (first.title, second.title) == ("chosen", "rejected")
        assert ids_of(first, learned=(False, True)) == chosen.token_ids
        assert ids_of(second, learned=(True,)) == rejected.token_ids[rejected.responses[0].start :]
        assert text_of(second, learned=False) == "", "the prompt is shown once"
        assert text_of(first, learned=True) == f"yes {HOSTILE}<|eos|>"
        assert text_of(first, learned=False).endswith("\n<|assistant|>\n")
    assert sum(shown.lengths) == report.num_tokens and len(shown.lengths) == 2 * len(dataset)
    assert sum(shown.learned) == dataset.num_label_tokens.sum()
    assert shown.refusal is None


def test_part_of_many_rows_and_what_is_cut(model: Path, pairs: Path) -> None:
    shown = sample("reward_model", model, pairs, "--max_seq_length", "100", num_read=5)
    assert len(shown.lengths) == 10 and max(shown.lengths) == 100
    assert shown.limit_flag == "--max_seq_length 100"
    assert any("cut to --max_seq_length" in line for line in shown.report.lines())
    assert {
        document.whole.num_label_tokens for row in shown.rows for document in row.documents
    } == {1}, "a reward is read once"


def test_prompts_with_what_judges_them(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5, surely"}]
    rows = write_rows(
        tmp_path / "p.jsonl", {"conversations": turns, "ground_truth": "5", "dataset": "gsm8k"}
    )
    (row,) = sample("grpo", model, rows).rows
    assert row.note == 'judged by gsm8k: "5"'
    assert text_of(row.documents[0], learned=False) == "<|bos|><|user|>\n2 + 3?\n<|assistant|>\n"
    assert row.documents[0].whole.num_label_tokens == 0
    (tmp_path / "system.txt").write_text("Sums.")
    changes = (
        "--remap_verifier",
        "gsm8k=math",
        "--system_prompt_override_file",
        str(tmp_path / "system.txt"),
    )
    (row,) = sample("grpo", model, rows, *changes).rows
    assert row.note == 'judged by math: "5"' and "Sums." in text_of(row.documents[0], learned=False)


def test_prompts_with_what_answers_them(model: Path, tmp_path: Path) -> None:
    asked = {"prompt": "Count to 3.", "env_config": {"env_name": "counter", "target": 3}}
    rows = write_rows(
        tmp_path / "p.jsonl", asked, asked | {"ground_truth": "3", "dataset": "gsm8k"}
    )
    shown = sample("grpo", model, rows)
    assert shown.refusal is None
    assert [row.note for row in shown.rows] == [
        "answered by counter",
        'answered by counter; judged by gsm8k: "3"',
    ]


@pytest.mark.slow
def test_users_own_code_may_load_torch(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef even(completion, ground_truth):\n    return 1.0\n"
    )
    rows = write_rows(tmp_path / "p.jsonl", {"prompt": "q", "ground_truth": "2", "dataset": "even"})
    words = ["--model_name_or_path", str(model), "--dataset_mixer_list", str(rows), "1.0"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "open_instruct.cli",
            "preview",
            "grpo",
            *words,
            "--verifier",
            f"{tmp_path}/own.py:even",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "judged by even: {" in done.stdout, done.stderr


def test_bad_rows_are_told_of_beside_the_good(model: Path, tmp_path: Path) -> None:
    reply = {"prompt": "q", "completion": "a", "label": True}
    rows = write_rows(tmp_path / "rows.jsonl", reply, reply | {"completion": "b"}, {"text": "?"})
    shown = sample("kto", model, rows)
    assert shown.rows[0].note == "given to the loss: 1"
    assert shown.rows[0].documents[1].title == "a reply of another row, for z0"
    assert "1 of 3 rows cannot be used" in str(shown.refusal) and "docs/kto.md" in str(
        shown.refusal
    )
    assert sample("kto", model, rows, "--on_bad_row", "skip").refusal is None


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], ("some/model", None)),
        (["--model_revision", "v2"], ("some/model", "v2")),
        (
            ["--tokenizer_name_or_path", "other/words", "--model_revision", "v2"],
            ("other/words", "v2"),
        ),
        (
            [
                "--tokenizer_name_or_path",
                "o/w",
                "--model_revision",
                "v2",
                "--tokenizer_revision",
                "v1",
            ],
            ("o/w", "v1"),
        ),
    ],
)
def test_tokenizer_is_that_of_the_revision(
    pairs: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], asked: tuple[str, str | None]
) -> None:
    """Rows are looked for before."""

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> None:
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        raise LookupError(f"{(name, revision)}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=re.escape(f"LookupError: {asked}")):
        sample("dpo", Path("some/model"), pairs, *words)
    with refused("missing_file", "mixer_list", "gone.jsonl"):
        sample("dpo", Path("some/model"), pairs.with_name("gone.jsonl"), *words)


def test_folder_has_no_revisions(model: Path, pairs: Path) -> None:
    with refused("conflict", "model_revision", "v2"):
        sample("dpo", model, pairs, "--model_revision", "v2")
    assert sample("dpo", model, pairs, "--model_revision", "main").rows


def printed(shown: Sample, **console: Any) -> str:
    out = StringIO()
    print_sample(shown, Console(file=out, highlight=False, soft_wrap=True, **console))
    return out.getvalue()


def test_terminal_shows_what_is_learned(model: Path, pairs: Path) -> None:
    shown = sample("dpo", model, pairs, num_shown=1)
    plain = printed(shown)
    assert "⟦nono" not in plain and "⟦no<|eos|>⟧" in plain and "second<|eos|>⟧" in plain
    assert "second⏎\n<|assistant|>⏎\n⟦yes" in plain
    assert "\x1b" not in plain
    assert (
        "tokens of 40 documents (median " in plain
        and "█" in plain
        and f"{pairs}: 20 taken of 20 rows" in plain
    )
    coloured = printed(shown, force_terminal=True, color_system="standard")
    assert "⟦" not in coloured.partition("\n")[2] and "\x1b[1;32mno<|eos|>\x1b[0m" in coloured
    for shown_so in (plain, coloured):
        assert "\\x1b[31m \\x9b31m \\u202e é🙂" in shown_so, "what a row holds steers no terminal"
        assert "\x1b[31m" not in shown_so and "\x9b" not in shown_so and "\u202e" not in shown_so


def test_note_steers_no_terminal(model: Path, tmp_path: Path) -> None:
    good = {"prompt": "2 + 3?", "ground_truth": "\x9b31m\u202e\ud800", "dataset": "gsm8k"}
    shown = sample("grpo", model, write_rows(tmp_path / "p.jsonl", good, {"\x9b31m\u202e": "?"}))
    assert '"\\x9b31m\\u202e' in printed(shown)
    assert "\x9b" not in printed(shown) + str(shown.refusal) and "\u202e" not in printed(
        shown
    ) + str(shown.refusal)


class Page(HTMLParser):
    """The texts of a page, and what is marked."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marked, self.tags = "", set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert not {"src", "href"} & dict(attrs).keys()
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "mark" in self.open and "div" in self.open:
            self.marked += data


def test_page_is_whole_and_runs_nothing(model: Path, pairs: Path) -> None:
    page = Page(html_page(sample("dpo", model, pairs, num_shown=1), title="Rows"))
    assert page.open == []
    assert not {"script", "img", "link", "iframe"} & page.tags
    assert page.marked == f"yes {HOSTILE}<|eos|>no<|eos|>".replace("\n", "⏎\n")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_bars_count_every_document_once(lengths: list[int]) -> None:
    bars = count_by_length(lengths)
    assert sum(bars.values()) == len(lengths) and len(bars) <= 16
    assert min(bars) == min(lengths)
    stops = [*bars, max(lengths) + 1][1:]
    assert len({stop - first for first, stop in zip(bars, stops[:-1], strict=False)}) <= 1, (
        "bars have one width"
    )
    for (first, count), stop in zip(bars.items(), stops, strict=True):
        assert sum(first <= length < stop for length in lengths) == count


def test_command_loads_no_torch(model: Path, pairs: Path, tmp_path: Path) -> None:
    """It writes the page, reads a hub copy, refuses what the run would refuse, and a run that there
    is not.
    """
    bad = write_rows(
        tmp_path / "bad.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"}, {"text": "x"}
    )
    hub_copy = write_rows(
        tmp_path / "hub" / "train.jsonl",
        {"prompt": "q", "chosen": "of a hub copy", "rejected": "b"},
    )
    (tmp_path / "hub" / "README.md").write_text("# Read by the datasets library\n")
    page = tmp_path / "page.html"
    words = ["--model_name_or_path", str(model), "--mixer_list"]
    calls = [
        ["dpo", *words, str(pairs), "1.0", "--out", str(page)],
        ["dpo", *words, str(Path(hub_copy).parent), "1.0"],
        ["dpo", *words, str(bad), "1.0"],
        ["dpoo"],
    ]
    code = (
        "import sys\nfrom open_instruct.cli import main\nprint([main(['preview', *words]) for "
        f"words in {calls!r}])\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"the page is in {page}"
    assert done.stdout.splitlines()[-1] == f"[0, 0, {EXIT_INPUT}, {EXIT_INPUT}]"
    assert "⟦a<|eos|>⟧" in done.stdout and "⟦of a hub copy<|eos|>⟧" in done.stdout
    assert (
        "1 of 2 rows cannot be used" in done.stderr
        and "'dpoo' is not a run; did you mean dpo?" in done.stderr
    )
    assert "PyTorch" not in done.stderr
    assert page.read_text().startswith("<!doctype html>")
