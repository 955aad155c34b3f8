"""--eval_split: the content of a row alone decides whether it is held out."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from open_instruct.data.eval_split import Side, find_place, join_columns
from open_instruct.data.prompts import PromptBuilder
from open_instruct.data.sft_rows import ReplyBuilder, SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.objectives.kto_rows import UnpairedBuilder
from tests.refusals import refused
from tests.unit.token_data import byte_tokenizer, load_rows, turns, write_rows

TOKENIZER = byte_tokenizer()


def conversation(number: int) -> dict[str, Any]:
    return {"messages": turns(f"question {number}", f"answer {number}"), "id": number}


def read_sides(
    path: Path, share: float, amount: str = "1.0", builder: type = SFTBuilder, **own: Any
) -> list[TokenDataset]:
    """The rows to train on, and those that are held out."""
    load = partial(
        load_rows, partial(load_token_dataset, builder), tokenizer=TOKENIZER, template="simple_chat"
    )
    own = own or {"max_seq_length": 128}
    sides = [Side(share=share, is_held_out=is_held_out) for is_held_out in (False, True)]
    return [
        load(path, amount, side=side, cache_dir=path.parent / "cache", **own)[0] for side in sides
    ]


def keys_of(dataset: TokenDataset) -> list[str]:
    return [dataset.key(row) for row in range(len(dataset))]


def test_split_is_the_same_whatever_other_rows_there_are_and_in_which_order(tmp_path: Path) -> None:
    rows = [conversation(number) for number in range(60)]
    training, held_out = read_sides(write_rows(tmp_path / "a.jsonl", *rows), 0.25)
    assert set(keys_of(training)).isdisjoint(keys_of(held_out))
    assert len(training) + len(held_out) == 60 and 5 <= len(held_out) <= 25
    more = [*rows, *(conversation(number) for number in range(60, 90))]
    random.Random(0).shuffle(more)
    training_of_more, held_out_of_more = read_sides(write_rows(tmp_path / "b.jsonl", *more), 0.25)
    assert set(keys_of(training)) <= set(keys_of(training_of_more))
    assert set(keys_of(held_out)) <= set(keys_of(held_out_of_more))
    _, half = read_sides(tmp_path / "a.jsonl", 0.5)
    assert set(keys_of(held_out)) < set(keys_of(half))


def test_equal_rows_are_on_one_side_also_where_they_differ_in_what_nothing_reads(
    tmp_path: Path,
) -> None:
    rows = [conversation(number % 12) | {"id": number} for number in range(48)]
    training, held_out = read_sides(write_rows(tmp_path / "rows.jsonl", *rows), 0.4)
    assert set(keys_of(training)).isdisjoint(keys_of(held_out))
    assert len(training) + len(held_out) == 48


def test_repeated_rows_are_held_out_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *(conversation(number) for number in range(30)))
    (once, held_out), (thrice, held_out_too) = read_sides(path, 0.3), read_sides(path, 0.3, "3.0")
    assert keys_of(held_out) == keys_of(held_out_too)
    assert len(thrice) == 3 * len(once)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_share_that_leaves_a_side_without_rows_is_refused_with_one_that_does_not(
    tmp_path: Path, share: float
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *(conversation(number) for number in range(5)))
    with refused("out_of_range", "eval_split", "5 rows") as caught:
        read_sides(path, share)
    training, held_out = read_sides(path, float(str(caught.value.remedy).rpartition(" ")[2]))
    assert len(training) and len(held_out)


def test_both_replies_of_a_pair_are_on_one_side_of_kto(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {number}", "chosen": "yes", "rejected": "no"} for number in range(40)]
    training, held_out = read_sides(
        write_rows(tmp_path / "rows.jsonl", *rows), 0.3, builder=UnpairedBuilder
    )
    prompts = [
        {document.token_ids[: document.responses[0].start] for (document,) in side}
        for side in (training, held_out)
    ]
    assert prompts[0].isdisjoint(prompts[1])
    assert 2 * len(prompts[1]) == len(held_out) > 0


def test_replies_of_a_conversation_are_on_one_side_where_each_has_a_row(tmp_path: Path) -> None:
    rows = [{"messages": turns(f"q {number}", "a", "r", "b")} for number in range(40)]
    sides = read_sides(write_rows(tmp_path / "rows.jsonl", *rows), 0.3, builder=ReplyBuilder)
    questions = [
        {TOKENIZER.decode(document.token_ids).split("\n")[0] for (document,) in side}
        for side in sides
    ]
    assert questions[0].isdisjoint(questions[1])
    assert 2 * len(questions[1]) == len(sides[1]) > 0


def test_prompts_with_several_answers_are_on_one_side(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q {number % 20}", "ground_truth": str(number), "dataset": "any"}
        for number in range(60)
    ]
    builder = partial(
        PromptBuilder, known_verifiers={"any": _Any()}, known_environments=frozenset()
    )
    sides = read_sides(
        write_rows(tmp_path / "rows.jsonl", *rows),
        0.3,
        builder=builder,
        max_prompt_token_length=128,  # type: ignore[arg-type]
    )
    texts = [{json.loads(side.details(row))["text"] for row in range(len(side))} for side in sides]
    assert texts[0].isdisjoint(texts[1]) and 3 * len(texts[1]) == len(sides[1]) > 0


def test_place_of_a_row_is_the_recorded_one() -> None:
    """A release that moved rows from one side to the other would train on what was held out."""
    assert join_columns({"b": 1, "a": ["é"]}) == join_columns({"a": ["é"], "b": 1})
    assert find_place('{"a": 1}') == pytest.approx(0.9759578799774999, abs=1e-12)


class _Any:
    needs_ground_truth = reads_row = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Everything will do."""
