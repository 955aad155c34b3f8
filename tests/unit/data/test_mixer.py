"""Mixer lists and the rows they select."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.config.validation import mixer_problems
from open_instruct.data.mixer import MixerEntry, parse_mixer_list, select_rows
from tests.refusals import refused


def entry(amount: float | int, name: str = "rows.jsonl", split: str = "train") -> MixerEntry:
    return MixerEntry(name=name, amount=amount, split=split)


def test_fractions_have_a_dot_and_counts_have_none() -> None:
    first, second = parse_mixer_list(["a.jsonl", "0.5", "b.jsonl", "300"], ["test"])
    assert (first.name, first.amount, first.split) == ("a.jsonl", 0.5, "test")
    assert (second.name, second.amount, second.split) == ("b.jsonl", 300, "test")
    assert [each.split for each in parse_mixer_list(["a", "1.0", "b", "2."], ["x", "y"])] == [
        "x",
        "y",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jsonl", "b.jsonl"], "'b.jsonl' after 'a.jsonl' is not an amount"),
        *((["a.jsonl", amount], "is not an amount") for amount in ("all", "1e3", "nan")),
        *(
            (["a.jsonl", amount], "finite amounts above 0")
            for amount in ("-1", "-0.5", "0", "0.0", "1.e999")
        ),
    ],
)
def test_lists_that_are_refused(words: list[str], message: str) -> None:
    (problem,) = mixer_problems("mixer_list", words, ["train"])
    assert problem.startswith("--mixer_list: ") and message in problem


@pytest.mark.parametrize(
    ("amount", "num_rows", "expected"),
    [
        *((1.0, 7, 7), (0.5, 3, 2), (0.29, 100, 29), (0.1, 5, 1), (2.5, 4, 10)),
        *((3, 7, 3), (7, 7, 7), (10, 4, 10), (1, 9, 1)),
    ],
)
def test_counts(amount: float | int, num_rows: int, expected: int) -> None:
    assert entry(amount).count(num_rows) == expected
    assert len(select_rows(entry(amount), num_rows, seed=0)) == expected


def test_counts_that_are_refused() -> None:
    with refused("bad_row", "mixer_list", "rows.jsonl"):
        entry(1.0).count(0)
    with refused("out_of_range", "mixer_list", "100"):
        entry(0.001).count(100)
    for amount in (10**12, 1e12):
        with refused("out_of_range", "mixer_list", "1", "000"):
            entry(amount).count(100)


def test_upsampling_is_whole_copies_and_a_random_part() -> None:
    rows = select_rows(entry(2.5), 4, seed=3)
    assert rows[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert len(set(rows[8:].tolist())) == 2


def test_selection_depends_on_seed_file_name_and_split() -> None:
    chosen = select_rows(entry(0.1), 1000, seed=0).tolist()
    assert chosen == select_rows(entry(0.1, name="/elsewhere/rows.jsonl"), 1000, seed=0).tolist()
    assert chosen != select_rows(entry(0.1), 1000, seed=1).tolist()
    assert chosen != select_rows(entry(0.1, name="other.jsonl"), 1000, seed=0).tolist()
    assert chosen != select_rows(entry(0.1, split="test"), 1000, seed=0).tolist()


AMOUNTS = st.integers(1, 300) | st.floats(0.05, 4.0)


@given(amount=AMOUNTS, num_rows=st.integers(10, 90), seed=st.integers(0, 9))
def test_every_row_comes_equally_often_or_once_more(
    amount: float | int, num_rows: int, seed: int
) -> None:
    rows = select_rows(entry(amount), num_rows, seed)
    assert rows.dtype == np.int64
    assert len(rows) == entry(amount).count(num_rows)
    times = Counter(rows.tolist())
    assert set(times) <= set(range(num_rows))
    counts = [times[i] for i in range(num_rows)]
    assert max(counts) - min(counts) <= 1


@given(
    num_rows=st.integers(1, 90),
    counts=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    seed=st.integers(0, 9),
)
def test_smaller_amount_takes_a_subset(num_rows: int, counts: tuple[int, int], seed: int) -> None:
    few, many = (
        Counter(select_rows(entry(count), num_rows, seed).tolist()) for count in sorted(counts)
    )
    assert few <= many
