"""From files of prompts to the tokenised data set, and the order in which prompts are asked."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Check, Prompt
from open_instruct.data import token_dataset
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.prompt_environments import find_environment
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.prompts import (
    Prompts,
    PromptStream,
    build_row_settings,
    load_prompt_dataset,
)
from open_instruct.data.report import DataReport
from open_instruct.rewards.answers import Passthrough
from open_instruct.rewards.registry import known_verifiers, list_judges
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, encoded, load_rows, turns, write_rows

Load = Callable[..., tuple[Prompts, DataReport]]
VERIFIERS = {
    name: known_verifiers(RewardSection())[name] for name in ("gsm8k", "ifeval", "string_matcher")
}
NO_COMMAS = {"func_name": "validate_no_commas"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def load(tokenizer: Any, tmp_path: Path) -> Load:
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "template": None,
        "cache_dir": tmp_path / "cache",
    }
    form = {"max_prompt_token_length": 64, "known_verifiers": VERIFIERS}
    return partial(load_rows, load_prompt_dataset, **given, **form)


def row(question: str, truth: Any = "1", verifier: Any = "gsm8k", **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "ground_truth": truth,
        "dataset": verifier,
    } | more


def numbered(path: Path, count: int) -> Path:
    return write_rows(path, *(row(f"q{i}", str(i)) for i in range(count)))


HEAD = len("BU\n") + len("\nA\n")  # bos, the role tokens and their line breaks


# --- one row
# --------------------------------------------------------------------------------------------


TEST = "assert add(1, 2) == 3"
PASSTHROUGH = ("passthrough", None, 1.0)


@pytest.mark.parametrize(
    ("keys", "checks"),
    [
        ({"ground_truth": "42", "dataset": "gsm8k"}, [("gsm8k", "42", 1.0)]),
        (
            {"ground_truth": ["a", "b"], "dataset": "string_matcher"},
            [("string_matcher", ["a", "b"], 1.0)],
        ),
        (
            {"ground_truth": ["42", NO_COMMAS], "dataset": ["gsm8k", "ifeval"]},
            [("gsm8k", "42", 1.0), ("ifeval", NO_COMMAS, 1.0)],
        ),
        (
            {"ground_truth": "42", "dataset": ["gsm8k", "string_matcher"], "weights": [1, 0.5]},
            [("gsm8k", "42", 1.0), ("string_matcher", "42", 0.5)],
        ),
        (
            {"ground_truth": 42, "dataset": ["gsm8k", "string_matcher"], "weight": 2},
            [("gsm8k", 42, 2.0), ("string_matcher", 42, 2.0)],
        ),
        ({"ground_truth": "42", "dataset": "GSM8K", "weights": None}, [("gsm8k", "42", 1.0)]),
        # Of one verifier in a list: an entry for it, several right answers, or a list of tests.
        ({"ground_truth": ["a"], "dataset": ["string_matcher"]}, [("string_matcher", "a", 1.0)]),
        (
            {"ground_truth": ["a", "b"], "dataset": ["string_matcher"]},
            [("string_matcher", ["a", "b"], 1.0)],
        ),
        ({"ground_truth": [TEST], "dataset": ["code"]}, [("code", [TEST], 1.0)]),
        ({"ground_truth": [[TEST]], "dataset": ["code"]}, [("code", [TEST], 1.0)]),
        # Those that compare with nothing.
        ({"dataset": "passthrough"}, [("passthrough", None, 1.0)]),
        ({"dataset": ["r1_format", "passthrough"]}, [("r1_format", None, 1.0), PASSTHROUGH]),
    ],
)
def test_verifiers_and_ground_truths_pair_up(
    keys: dict[str, Any], checks: list[tuple[str, Any, float]]
) -> None:
    verifiers = known_verifiers(RewardSection())
    messages, found, _ = parse_prompt_row({"prompt": "?"} | keys, verifiers)
    assert messages == ({"role": "user", "content": "?"},)
    assert [(check.verifier, check.ground_truth, check.weight) for check in found] == checks


@pytest.mark.parametrize(
    "said", [None, "", "[]", [], {}, {"env_configs": [], "max_steps": None}, [{"env_name": None}]]
)
def test_column_of_environments_that_says_nothing_is_nothing(said: Any) -> None:
    messages, *_ = parse_prompt_row(row("q") | {"env_config": said, "tools": said}, VERIFIERS)
    assert messages[-1]["content"] == "q"


def test_answer_behind_the_question_is_left_out() -> None:
    messages, *_ = parse_prompt_row(row("?", messages=turns(*"suaua", roles="suaua")), VERIFIERS)
    assert [message["content"] for message in messages] == ["s", "u", "a", "u"]


def test_verifier_that_fails_over_a_ground_truth_refuses_the_row() -> None:
    class Picky(Passthrough):
        def check_ground_truth(self, ground_truth: Any) -> None:
            ground_truth["key"]

    with pytest.raises(
        MalformedRow, match="'ground_truth' for 'picky': TypeError: string indices"
    ) as raised:
        parse_prompt_row(row("q", verifier="picky"), {"picky": Picky()})
    assert raised.value.kind == "bad_ground_truth"
    assert parse_prompt_row(row("q", {"key": 1}, verifier="picky"), {"picky": Picky()})[1]


class TestRowsThatNameNoVerifier:
    def test_verifiers_of_the_flag_judge_rows_that_name_none(self) -> None:
        _, checks, _ = parse_prompt_row(
            {"question": "q", "ground_truth": "4"}, VERIFIERS, judges=["gsm8k"]
        )
        assert checks == (Check(verifier="gsm8k", ground_truth="4"),)
        _, checks, _ = parse_prompt_row(
            {"prompt": "q", "ground_truth": "4"}, VERIFIERS, judges=["gsm8k", "string_matcher"]
        )
        assert [(check.verifier, check.ground_truth) for check in checks] == [
            ("gsm8k", "4"),
            ("string_matcher", "4"),
        ]
        _, (check,), _ = parse_prompt_row(
            row("q", verifier="string_matcher"), VERIFIERS, judges=["gsm8k"]
        )
        assert check.verifier == "string_matcher"

    def test_flag_takes_names_classes_and_folders(self, tmp_path: Path) -> None:
        own = tmp_path / "mine.py"
        own.write_text(
            "from open_instruct.rewards.verifier import Verifier\nclass Short(Verifier):\n    "
            "name = 'short'\n    def score(self, completion, ground_truth):\n        return "
            "float(len(completion) < 9)\n"
        )
        words = ["math", f"{own}:Short", "reward_model:/a/folder,last"]
        assert list_judges(words) == ["math", "short", "reward_model"]
        assert "short" in known_verifiers(RewardSection(verifier=words[:2]))
        with refused("bad_value", "verifier", "gsm", "gsm8k"):
            known_verifiers(RewardSection(verifier=["gsm"]))

    def test_rows_of_verl(self, load: Load, tmp_path: Path) -> None:
        row = {"prompt": turns("2 + 2?"), "reward_model": {"ground_truth": "4", "style": "rule"}}
        path = write_rows(tmp_path / "rows.jsonl", row)
        columns = ["ground_truth=reward_model.ground_truth"]
        prompts, report = load(path, "1.0", columns=columns, judges=["gsm8k"])
        assert prompts[0].checks == (Check(verifier="gsm8k", ground_truth="4"),)
        assert report.warnings == []
        with refused("bad_row", None, "ground_truth=reward_model.ground_truth"):
            load(path, "1.0", judges=["gsm8k"], known_verifiers=VERIFIERS)


# --- the data set
# ---------------------------------------------------------------------------------------


def test_verifier_may_stand_in_for_another(load: Load, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "p.jsonl",
        row("q", verifier="Math_DAPO"),
        row("r", ["1", "2"], ["string_matcher", "math_dapo"]),
    )
    with refused("bad_row", None, "'Math_DAPO'"):
        load(path, "1.0")
    prompts, _ = load(path, "1.0", remapped={"math_dapo": "gsm8k"})
    names = [[check.verifier for check in prompts[index].checks] for index in range(2)]
    assert sorted(names) == [["gsm8k"], ["string_matcher", "gsm8k"]]


def test_system_prompt_replaces_the_rows_own(load: Load, tmp_path: Path) -> None:
    with_system = row("q", messages=turns("be long", "q", roles="su"))
    path = write_rows(tmp_path / "p.jsonl", row("q"), with_system)
    prompts, _ = load(path, "1.0", system_prompt="be brief")
    texts = {prompts[index].text for index in range(2)}
    assert len(texts) == 1 and "be brief" in texts.pop()
    assert not any("be brief" in prompt.text for prompt in load(path, "1.0")[0]), (
        "the cache knows them apart"
    )


def test_flags_change_rows_of_prompts(tmp_path: Path) -> None:
    required = [
        "--model_name_or_path",
        "m",
        "--dataset_mixer_list",
        "p.jsonl",
        "1.0",
        "--output_dir",
        "out",
    ]
    file = tmp_path / "system.txt"
    file.write_text("  be brief\n")

    def changes(*words: str) -> dict[str, Any]:
        return build_row_settings(parse_run(GRPOConfig, [*required, *words]))

    none = {"judges": [], "remapped": {}, "environment": None, "system_prompt": None}
    assert changes() == none
    assert changes("--remap_verifier", "a=b", "c=d") == none | {"remapped": {"a": "b", "c": "d"}}
    assert changes("--system_prompt_override_file", str(file)) == none | {
        "system_prompt": "be brief"
    }
    with refused("missing_file", "system_prompt_override_file", "none.txt"):
        changes("--system_prompt_override_file", str(tmp_path / "none.txt"))
    with refused("bad_value", "remap_verifier", "OLD=NEW"):
        validate_grpo(parse_run(GRPOConfig, [*required, "--remap_verifier", "a"]))


def test_prompt_by_hand(load: Load, tokenizer: Any, tmp_path: Path) -> None:
    dataset, report = load(write_rows(tmp_path / "rows.jsonl", row("hi", "5")), "1.0")
    text = "<|bos|><|user|>\nhi\n<|assistant|>\n"
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len(ids) == HEAD + 2
    assert list(dataset) == [
        Prompt(
            row_id=0, token_ids=ids, text=text, checks=(Check(verifier="gsm8k", ground_truth="5"),)
        )
    ]
    assert (len(dataset), dataset.dataset.num_tokens.tolist(), report.num_tokens) == (
        1,
        [HEAD + 2],
        HEAD + 2,
    )
    assert dataset[-1] == dataset[0]
    with pytest.raises(IndexError):
        dataset[1]


def test_prompt_has_the_tokens_of_a_supervised_row(
    load: Load, tokenizer: Any, tmp_path: Path
) -> None:
    asked = turns("Be brief.", "What is 2 + 3?", "5", "And 4 + 4? ✓", roles="suau")
    path = write_rows(tmp_path / "rows.jsonl", row("?", messages=asked))
    dataset, _ = load(path, "1.0", max_prompt_token_length=200)
    chat = ChatFormat.choose(tokenizer, None)
    whole = encoded(chat, [*asked, *turns("8", roles="a")])
    assert dataset[0].token_ids == whole.token_ids[: whole.responses[0].start]


def test_long_prompts_are_left_out_and_counted(load: Load, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", row("12345678"), row("123456789"), row("1"))
    dataset, report = load(rows, "1.0", max_prompt_token_length=HEAD + 8)
    assert [len(prompt.token_ids) for prompt in dataset] == [HEAD + 8, HEAD + 1]
    assert [prompt.row_id for prompt in dataset] == [0, 1]
    assert report.filtered == {"prompt_too_long": 1}
    assert (
        report.num_rows
        == sum(report.bad.values()) + sum(report.filtered.values()) + report.num_kept
    )
    told = "\n".join(report.lines())
    assert "1 row left out: the prompt is longer than --max_prompt_token_length" in told
    assert f"2 prompts, {2 * HEAD + 9} tokens, {HEAD + 4} tokens a prompt" in told
    with refused("bad_row", "max_prompt_token_length", "4", f"{HEAD + 1}"):
        load(rows, "1.0", max_prompt_token_length=4)


def test_bad_rows_name_file_and_line(load: Load, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl",
        row("q"),
        row("q", verifier="math1"),
        row("q", verifier="string_match"),
    )
    with pytest.raises(InputError) as raised:
        load(rows, "1.0")
    told = str(raised.value)
    assert "2 of 3 rows cannot be used (unknown_verifier 2)" in told
    assert f"{rows}, line 2: 'dataset': there is no verifier 'math1'" in told
    assert (
        f"{rows}, line 3: 'dataset': there is no verifier 'string_match'; did you mean "
        "string_matcher?"
    ) in told


def test_parquet_rows_are_the_same_prompts(load: Load, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        row("one", ["1", "one"], ["gsm8k", "string_matcher"], weights=[1.0, 0.5]),
        row("two", ["2"], ["gsm8k"], weights=None),
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_lines, _ = load(write_rows(tmp_path / "rows.jsonl", *rows), "1.0")
    from_table, _ = load(tmp_path / "rows.parquet", "1.0")
    assert list(from_table) == list(from_lines)
    assert from_table.fingerprint == from_lines.fingerprint


def test_cache_is_not_asked_where_anything_differs(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = numbered(tmp_path / "rows.jsonl", 4)
    dataset, report = load(rows, "2.5")
    counts = Counter(prompt.checks[0].ground_truth for prompt in dataset)
    assert sorted(counts.values()) == [2, 2, 3, 3]
    assert (report.num_kept, report.num_pairs, len(dataset.dataset.token_ids_T)) == (
        4,
        10,
        4 * (HEAD + 2),
    )
    again, report = load(rows, "2.5")
    assert (report.from_cache, report.unit) == (True, "prompt")
    assert list(again) == list(dataset) and again.fingerprint == dataset.fingerprint
    others: list[dict[str, Any]] = [
        {"known_verifiers": {"gsm8k": VERIFIERS["gsm8k"]}},
        {"max_prompt_token_length": 63},
        {"seed": 1},
        {"template": "tulu"},
        {"columns": ["system=prompt"]},
    ]
    for other in others:
        assert not load(rows, "2.5", **other)[1].from_cache, other
    assert load(rows, "2.5", known_verifiers=dict(reversed(VERIFIERS.items())))[1].from_cache
    monkeypatch.setattr(token_dataset, "CACHE_VERSION", -1)
    assert not load(rows, "2.5")[1].from_cache


def test_fingerprint_covers_prompts_and_checks(load: Load, tmp_path: Path) -> None:
    others = [row("s"), row("r", "2"), row("r", weight=2)]
    mixtures = [
        [row("q"), row("r")],
        [row("r"), row("q")],
        *([row("q"), other] for other in others),
    ]
    fingerprints = set()
    for number, rows in enumerate(mixtures):
        fingerprints.add(
            load(write_rows(tmp_path / f"{number}.jsonl", *rows), "1.0")[0].fingerprint
        )
    assert len(fingerprints) == 5


# --- the stream
# -----------------------------------------------------------------------------------------


@pytest.fixture
def dataset(load: Load, tmp_path: Path) -> Prompts:
    return load(numbered(tmp_path / "rows.jsonl", 5), "1.0")[0]


def asked(stream: PromptStream, count: int) -> list[int]:
    """Row ids of the next `count` prompts."""
    return [stream.next()[1].row_id for _ in range(count)]


def test_each_epoch_is_another_permutation_of_all(dataset: Prompts) -> None:
    rows = asked(PromptStream(dataset, seed=0), 50)
    epochs = [rows[i : i + 5] for i in range(0, 50, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 5
    assert rows == asked(PromptStream(dataset, seed=0), 50)
    assert rows != asked(PromptStream(dataset, seed=1), 50)
    for epoch, order in enumerate(epochs):
        assert order == np.random.default_rng([0, epoch]).permutation(5).tolist()


def test_excluded_prompts_do_not_come_again(dataset: Prompts) -> None:
    stream, whole = PromptStream(dataset, seed=3), PromptStream(dataset, seed=3)
    assert asked(stream, 2) == asked(whole, 2)
    stream.exclude(4)
    stream.exclude(4)
    assert stream.num_left == 4
    # The others come in the order in which they would have come, and tickets count what is asked.
    drawn = [stream.next() for _ in range(20)]
    assert [ticket for ticket, _ in drawn] == list(range(2, 22))
    assert [prompt.row_id for _, prompt in drawn] == list(
        islice((row for row in asked(whole, 40) if row != 4), 20)
    )
    assert all(prompt == dataset[prompt.row_id] for _, prompt in drawn)
    for row_id in range(3):
        stream.exclude(row_id)
    assert asked(stream, 3) == [3, 3, 3]
    stream.exclude(3)
    with pytest.raises(RunError, match="all 5 prompts have reached --no_resampling_pass_rate"):
        stream.next()


@pytest.mark.parametrize("num_before", [0, 3, 5, 12])
def test_resumed_stream_goes_on(dataset: Prompts, num_before: int) -> None:
    stream = PromptStream(dataset, seed=7)
    asked(stream, num_before)
    stream.exclude(1)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(dataset, seed=7)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [stream.next() for _ in range(17)] == [resumed.next() for _ in range(17)]


def test_state_of_other_prompts_or_another_seed_is_refused(
    load: Load, dataset: Prompts, tmp_path: Path
) -> None:
    state = PromptStream(dataset, seed=0).state_dict()
    with refused("other_run", "seed", "0", "1"):
        PromptStream(dataset, seed=1).load_state_dict(state)
    other, _ = load(numbered(tmp_path / "others.jsonl", 6), "1.0")
    with refused("other_run", "dataset_mixer_list", "--max_prompt_token_length"):
        PromptStream(other, seed=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("keys", "default", "expected"),
    [
        ({}, None, None),
        ({}, "shop", ("shop", {})),
        (
            {"env_config": {"env_name": "shop", "stock": 3, "is_text_env": True}},
            None,
            ("shop", {"stock": 3}),
        ),
        ({"env_config": [{"env_name": "shop", "stock": None}]}, "game", ("shop", {})),
        (
            {
                "env_config": {"env_configs": [{"env_name": "game"}], "max_steps": 4},
                "tools": ["look"],
                "level": 2,
            },
            None,
            ("game", {"max_steps": 4, "tools": ["look"], "level": 2}),
        ),
        ({"env_config": {"env_configs": []}, "tools": []}, None, None),
    ],
)
def test_row_names_what_answers_its_replies(
    keys: dict[str, Any], default: str | None, expected: tuple[str, dict[str, Any]] | None
) -> None:
    """As open-instruct's rows do, in any of its three forms;

    Arrow fills missing keys with empty values.
    """
    found = find_environment(keys, default=default, environments={"shop", "game"})
    if found is not None:
        name, columns = found
        found = name, {key: value for key, value in columns.items() if key != "tools" or value}
    assert found == expected


def test_names_of_verifiers_and_environments_come_from_one_reading_of_rows(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(
        tmp_path / "named.jsonl",
        row("plain", environment="python", verifier_="x"),
        row(
            "answered",
            env_config={"env_name": "shop"},
            environment="none",
            note='"verifier": "judge", "ground_truth": 1',
        ),
    )
    prompts, _ = load(rows, "1.0", known_environments={"shop"})
    details, read = prompts.dataset.details, list[int]()
    monkeypatch.setattr(
        prompts.dataset, "details", lambda row_id: read.append(row_id) or details(row_id)
    )
    assert prompts.find_names() == ({"gsm8k"}, {"shop"})
    assert read == [0, 1]


def test_held_out_prompts_among_the_training_prompts_are_counted(
    load: Load, tmp_path: Path
) -> None:
    training, _ = load(numbered(tmp_path / "a.jsonl", 9), "1.0")
    others = [row("q2", "7"), row("q2 "), row("q12"), row("q8")]
    held_out, _ = load(write_rows(tmp_path / "b.jsonl", *others), "1.0")
    assert held_out.count_shared(training) == 2
    assert training.count_shared(held_out) == 2
