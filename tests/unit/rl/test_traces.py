"""Saved rollouts: exactly what a step had, and messages for what is not there."""

import errno
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from open_instruct.core.errors import RunError
from open_instruct.core.records import (
    Check,
    Completion,
    Episode,
    Prompt,
    RolloutGroup,
    Span,
    Verdict,
)
from open_instruct.rl.samples import RolloutStepBatch, StepSamples, training_samples
from open_instruct.rl.traces import Traces, read_traces, trace_file, write_traces
from tests.refusals import refused
from tests.tiers import num_examples
from tests.unit.fake_rollouts import completion, group_of, grpo_config

CONFIG = grpo_config().rollout

finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=8)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(token_ids)
    size = len(ids)
    return Completion(
        token_ids=ids,
        logprobs=tuple(draw(st.lists(finite, min_size=size, max_size=size))),
        versions=tuple(draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size))),
        text=draw(text),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


checks = st.builds(Check, verifier=text, ground_truth=json_values, weight=finite)
prompts = st.builds(
    Prompt,
    row_id=st.integers(0, 10**9),
    token_ids=token_ids,
    text=text,
    checks=st.lists(checks, max_size=2).map(tuple),
)
verdicts = st.builds(
    Verdict,
    reward=finite,
    scores=st.dictionaries(text, finite, max_size=2),
    problems=st.lists(text, max_size=2).map(tuple),
)


@st.composite
def groups(draw: st.DrawFn, ticket: int) -> RolloutGroup:
    answers = draw(st.lists(st.tuples(completions(), verdicts), min_size=1, max_size=3))
    return RolloutGroup(
        ticket=ticket,
        prompt=draw(prompts),
        completions=tuple(completion for completion, _ in answers),
        verdicts=tuple(verdict for _, verdict in answers),
    )


@st.composite
def batches(draw: st.DrawFn) -> RolloutStepBatch:
    return RolloutStepBatch(
        groups=tuple(draw(groups(ticket)) for ticket in range(0, 2 * draw(st.integers(0, 3)), 2)),
        rejected=tuple(draw(groups(ticket)) for ticket in range(1, 2 * draw(st.integers(0, 2)), 2)),
    )


def unlearned(batch: RolloutStepBatch) -> StepSamples:
    """Advantages and flags of the right shape; rewards at the ends of float64 have no standard
    deviation.
    """
    return StepSamples(
        samples=(),
        advantages=tuple((0.25,) * len(group.completions) for group in batch.groups),
        is_used=tuple((True,) * len(group.completions) for group in batch.groups),
        metrics={},
    )


@settings(max_examples=num_examples(60))
@given(batch=batches())
def test_traces_come_back_as_written(batch: RolloutStepBatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_traces(Path(folder), 3, batch, unlearned(batch))
        assert read_traces(Path(folder), 3) == list(batch.groups)


def test_episode_comes_back_exactly(tmp_path: Path) -> None:
    episode = Episode(
        status="env_error",
        replies=(Span(start=0, stop=1), Span(start=3, stop=4)),
        turns=({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}),
        rewards={"calculator": 0.5},
        prompt_token_ids=(1, 40),
        problem="it was lost",
    )
    answer = replace(completion(2), token_ids=(60, 8, 9, 61), episode=episode)
    batch = RolloutStepBatch(groups=(group_of([1.0], [answer]),))
    write_traces(tmp_path, 1, batch, unlearned(batch))
    assert read_traces(tmp_path, 1) == list(batch.groups)


MIXED = group_of([1.0, 0.0])
BATCH = RolloutStepBatch(groups=(MIXED,))


def write(folder: Path, step: int, batch: RolloutStepBatch = BATCH) -> Path:
    return write_traces(
        folder, step, batch, training_samples(batch, config=CONFIG, version=step - 1)
    )


def test_columns_that_people_read(tmp_path: Path) -> None:
    mixed = group_of([1.0, 0.0], [completion(2, versions=(0, 1)), completion(2)])
    batch = RolloutStepBatch(
        groups=(mixed, group_of([1.0, 1.0], ticket=2)), rejected=(group_of([0.0, 0.0], ticket=1),)
    )
    rows = parquet.read_table(write(tmp_path, 2, batch)).to_pylist()
    assert [(row["step"], row["ticket"], row["sample_index"]) for row in rows] == [
        *((2, 0, 0), (2, 0, 1)),
        *((2, 2, 0), (2, 2, 1)),
        *((2, 1, 0), (2, 1, 1)),
    ]
    assert [row["used_in_training"] for row in rows] == [True, True, False, False, False, False]
    assert [row["rejected"] for row in rows] == [False] * 4 + [True] * 2
    assert [row["advantage"] for row in rows] == [
        pytest.approx(1),
        pytest.approx(-1),
        0,
        0,
        None,
        None,
    ]
    first = rows[0]
    assert (first["row_id"], first["prompt"], first["prompt_token_ids"]) == (
        7,
        "2 + 2?",
        [1, 40, 2],
    )
    assert (first["completion"], first["token_ids"], first["logprobs"]) == (
        "4",
        [60, 61],
        [0.0, -0.1],
    )
    assert (first["versions"], first["finish_reason"], first["seed"]) == ([0, 1], "stop", 0)
    assert (first["reward"], first["scores"]) == (1.0, '{"math": 1.0}')


def test_step_that_is_taken_again_replaces_its_file(tmp_path: Path) -> None:
    write(tmp_path, 1)
    again = RolloutStepBatch(groups=(group_of([0.0, 1.0]),))
    path = write(tmp_path, 1, again)
    assert read_traces(tmp_path, 1) == list(again.groups)
    assert [file.name for file in path.parent.iterdir()] == ["step1.parquet"]


def test_step_without_a_trace_names_those_there_are(tmp_path: Path) -> None:
    with refused("missing_file", "no_save_traces"):
        read_traces(tmp_path, 1)
    for step in (2, 10):
        write(tmp_path, step)
    with refused("missing_file", None, "step3.parquet", "2, 10"):
        read_traces(tmp_path, 3)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:100])
    with refused("unreadable_file", None, "step1.parquet"):
        read_traces(tmp_path, 1)


def test_folder_that_cannot_be_written_is_a_failure_of_the_run(tmp_path: Path) -> None:
    trace_file(tmp_path, 1).parent.write_text("in the way")
    with pytest.raises(RunError, match="cannot be written"):
        write(tmp_path, 1)


# --- how many are kept
# ----------------------------------------------------------------------------------


def take_steps(folder: Path, *steps: int, asked: bool | None = None) -> list[str]:
    """A run, or one that goes on, with those steps; what it warned of."""
    told: list[str] = []
    traces = Traces(folder, save_traces=asked, warn=told.append)
    for step in steps:
        traces.add(step, BATCH, training_samples(BATCH, config=CONFIG, version=step - 1))
    return told


def steps_in(folder: Path) -> list[int]:
    return sorted(
        int(file.stem.removeprefix("step")) for file in (folder / "traces").glob("step*.parquet")
    )


@pytest.fixture
def room_for_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    size = write(tmp_path / "one", 1).stat().st_size
    monkeypatch.setattr("open_instruct.rl.traces.MOST_BYTES", 3 * size + size // 2)


@pytest.mark.parametrize(
    ("starts", "left"),
    [
        ([(None, range(1, 12))], [9, 10, 11]),
        # Steps that are taken again replace their files, also where later ones are still there.
        ([(None, range(1, 6)), (None, [4])], [3, 4, 5]),
        ([(None, range(1, 6)), (None, [4]), (None, [2])], [2, 4, 5]),
        ([(None, range(1, 6)), (None, [4]), (None, [2]), (None, range(3, 7))], [4, 5, 6]),
        ([(True, range(1, 8)), (False, [8])], [1, 2, 3, 4, 5, 6, 7]),
        # What was asked for stays where the run goes on unasked.
        ([(True, range(1, 6)), (None, range(6, 12))], [1, 2, 3, 4, 5, 9, 10, 11]),
    ],
)
def test_steps_that_are_kept(
    room_for_three: None,
    tmp_path: Path,
    starts: list[tuple[bool | None, list[int]]],
    left: list[int],
) -> None:
    for asked, steps in starts:
        assert take_steps(tmp_path, *steps, asked=asked) == []
    assert steps_in(tmp_path) == left
    assert read_traces(tmp_path, left[0]) == [MIXED]


def test_newest_is_kept_however_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("open_instruct.rl.traces.MOST_BYTES", 1)
    take_steps(tmp_path, 1, 2)
    assert steps_in(tmp_path) == [2]


def test_full_disk_ends_only_a_run_that_was_asked_for_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(table: Any, where: Path, **_: Any) -> None:
        where.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", write_half)
    (told,) = take_steps(tmp_path, 1, 2, 3)
    assert "step1.parquet cannot be written: No space left on device" in told
    assert told.endswith("the run goes on, and writes no more traces")
    with pytest.raises(RunError, match="No space left on device; or give --no_save_traces"):
        take_steps(tmp_path, 1, asked=True)
    assert list((tmp_path / "traces").iterdir()) == []
