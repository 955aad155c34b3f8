"""The made sums: right where they should be, disjoint where they must be, short enough for a small
model.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.tiny_model import built_in_corpus, train_tokenizer
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.rewards.registry import known_verifiers
from scripts.demo_data.sums import NUM_PROBLEMS, worked_out, write_arithmetic
from tests.unit.token_data import encoded

Rows = list[dict[str, Any]]
FILES = ("sft", "prompts", "held_out")


def read(folder: Path) -> tuple[Rows, Rows, Rows]:
    sft, prompts, held_out = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in FILES
    )
    return sft, prompts, held_out


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, Rows, Rows]:
    folder = tmp_path_factory.mktemp("arithmetic")
    write_arithmetic(folder, num_sft_rows=3000, num_prompts=4500, num_held_out=200, seed=0)
    return read(folder)


def operands(row: dict[str, Any]) -> tuple[int, int]:
    a, b = map(int, re.findall(r"\d+", row["messages"][0]["content"]))
    return a, b


def last_number(text: str) -> int:
    return int(re.findall(r"\d+", text)[-1])


def test_every_step_of_every_sum_is_right() -> None:
    assert worked_out(47, 38) == "7+8=15 4+3+1=8 85"
    assert worked_out(12, 93) == "2+3=5 1+9=10 105"
    for a in range(10, 100):
        for b in range(10, 100):
            *steps, answer = worked_out(a, b).split()
            for step in steps:
                terms, _, result = step.partition("=")
                assert sum(map(int, terms.split("+"))) == int(result)
            assert int(answer) == a + b


def test_sizes_and_forms(rows: tuple[Rows, Rows, Rows]) -> None:
    sft, prompts, held_out = rows
    assert list(map(len, rows)) == [3000, 4500, 200]
    assert {tuple(message["role"] for message in row["messages"]) for row in sft} == {
        ("user", "assistant")
    }
    verifiers = known_verifiers(RewardSection())
    for row in prompts + held_out:
        _, checks, _ = parse_prompt_row(row, verifiers)
        assert [(check.verifier, check.ground_truth) for check in checks] == [
            ("gsm8k", str(sum(operands(row))))
        ]


def test_held_out_sums_are_in_no_other_file_in_either_order(rows: tuple[Rows, Rows, Rows]) -> None:
    sft, prompts, held_out = ({tuple(sorted(operands(row))) for row in part} for part in rows)
    assert len(held_out) == 200
    assert not held_out & (sft | prompts)
    # 4,500 prompts are more than there are sums left, so every one of them is asked.
    assert len(prompts) == NUM_PROBLEMS - 200


def test_careful_replies_are_right_and_hasty_ones_seldom(rows: tuple[Rows, Rows, Rows]) -> None:
    replies = [(sum(operands(row)), row["messages"][1]["content"]) for row in rows[0]]
    careful = [(answer, reply) for answer, reply in replies if "=" in reply]
    hasty = [(answer, int(reply)) for answer, reply in replies if "=" not in reply]
    assert 0.35 < len(careful) / len(replies) < 0.45
    assert all(last_number(reply) == answer for answer, reply in careful)
    assert all(abs(reply - answer) <= 10 for answer, reply in hasty)
    assert sum(reply == answer for answer, reply in hasty) < 0.1 * len(hasty)


def test_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        write_arithmetic(
            tmp_path / name, num_sft_rows=20, num_prompts=20, num_held_out=20, seed=seed
        )
    for file in (f"{name}.jsonl" for name in FILES):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        assert (tmp_path / "one" / file).read_bytes() != (tmp_path / "other" / file).read_bytes()


def test_replies_fit_into_24_tokens(rows: tuple[Rows, Rows, Rows]) -> None:
    tokenizer = train_tokenizer(built_in_corpus(), vocab_size=262)
    chat = ChatFormat.choose(tokenizer, None)
    documents = [encoded(chat, row["messages"]) for row in rows[0][:300]]
    assert max(len(document.responses[0]) for document in documents) <= 24
    assert max(document.responses[0].start for document in documents) <= 24


def test_arithmetic_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hold out between 0 and 2,047"):
        write_arithmetic(tmp_path, num_sft_rows=1, num_prompts=1, num_held_out=3000, seed=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_arithmetic(tmp_path / "file", num_sft_rows=1, num_prompts=1, num_held_out=1, seed=0)
