"""Saved rollouts: exactly what a step had, and messages for what is not there."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.parser import parse
from open_instruct.errors import InputError, RunError
from open_instruct.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.rollout.samples import RolloutStepBatch, StepSamples, training_samples
from open_instruct.rollout.traces import Traces, read_traces, trace_file, write_traces

REQUIRED = ["--model_name_or_path", "m", "--dataset_mixer_list", "prompts.jsonl", "1.0", "--output_dir", "out"]
CONFIG = parse(GRPOConfig, REQUIRED).rollout

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
    of_tokens = draw(token_ids)
    size = len(of_tokens)
    return Completion(
        token_ids=of_tokens,
        logprobs=tuple(draw(st.lists(finite, min_size=size, max_size=size))),
        versions=tuple(draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size))),
        text=draw(text),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@st.composite
def groups(draw: st.DrawFn, ticket: int) -> RolloutGroup:
    prompt = Prompt(
        row_id=draw(st.integers(0, 10**9)),
        token_ids=draw(token_ids),
        text=draw(text),
        checks=tuple(
            draw(st.lists(st.builds(Check, verifier=text, ground_truth=json_values, weight=finite), max_size=2))
        ),
    )
    answers = tuple(draw(st.lists(completions(), min_size=1, max_size=3)))
    verdict = st.builds(
        Verdict,
        reward=finite,
        scores=st.dictionaries(text, finite, max_size=2),
        problems=st.lists(text, max_size=2).map(tuple),
    )
    verdicts = tuple(draw(st.lists(verdict, min_size=len(answers), max_size=len(answers))))
    return RolloutGroup(ticket=ticket, prompt=prompt, completions=answers, verdicts=verdicts)


@st.composite
def batches(draw: st.DrawFn) -> RolloutStepBatch:
    return RolloutStepBatch(
        groups=tuple(draw(groups(ticket)) for ticket in range(0, 2 * draw(st.integers(0, 3)), 2)),
        rejected=tuple(draw(groups(ticket)) for ticket in range(1, 2 * draw(st.integers(0, 2)), 2)),
    )


def unlearned(batch: RolloutStepBatch) -> StepSamples:
    """Advantages and flags of the right shape; rewards at the ends of float64 have no standard deviation."""
    return StepSamples(
        samples=(),
        advantages=tuple((0.25,) * len(group.completions) for group in batch.groups),
        is_used=tuple((True,) * len(group.completions) for group in batch.groups),
        metrics={},
    )


@settings(max_examples=60)
@given(batch=batches())
def test_what_was_written_comes_back_exactly(batch: RolloutStepBatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_traces(Path(folder), 3, batch, unlearned(batch))
        assert read_traces(Path(folder), 3) == list(batch.groups)


def group_of(ticket: int, *rewards: float) -> RolloutGroup:
    return RolloutGroup(
        ticket=ticket,
        prompt=Prompt(row_id=4, token_ids=(1, 2), text="2 + 2?", checks=(Check(verifier="math", ground_truth="4"),)),
        completions=tuple(
            Completion(
                token_ids=(5, 6), logprobs=(-0.1, -0.2), versions=(0, 1), text="4", finish_reason="stop", seed=index
            )
            for index in range(len(rewards))
        ),
        verdicts=tuple(Verdict(reward=reward, scores={"math": reward}) for reward in rewards),
    )


def batch_of(*groups: RolloutGroup, rejected: tuple[RolloutGroup, ...] = ()) -> RolloutStepBatch:
    return RolloutStepBatch(groups=groups, rejected=rejected)


def write(folder: Path, step: int, batch: RolloutStepBatch) -> Path:
    return write_traces(folder, step, batch, training_samples(batch, config=CONFIG, version=step - 1))


def test_the_columns_that_people_read(tmp_path: Path) -> None:
    batch = batch_of(group_of(0, 1.0, 0.0), group_of(2, 1.0, 1.0), rejected=(group_of(1, 0.0, 0.0),))
    rows = parquet.read_table(write(tmp_path, 2, batch)).to_pylist()
    assert [(row["step"], row["ticket"], row["sample_index"]) for row in rows] == [
        *((2, 0, 0), (2, 0, 1)),
        *((2, 2, 0), (2, 2, 1)),
        *((2, 1, 0), (2, 1, 1)),
    ]
    assert [row["used_in_training"] for row in rows] == [True, True, False, False, False, False]
    assert [row["rejected"] for row in rows] == [False] * 4 + [True] * 2
    assert [row["advantage"] for row in rows] == [pytest.approx(1), pytest.approx(-1), 0, 0, None, None]
    first = rows[0]
    assert (first["row_id"], first["prompt"], first["prompt_token_ids"]) == (4, "2 + 2?", [1, 2])
    assert (first["completion"], first["token_ids"], first["logprobs"]) == ("4", [5, 6], [-0.1, -0.2])
    assert (first["versions"], first["finish_reason"], first["seed"]) == ([0, 1], "stop", 0)
    assert (first["reward"], first["scores"]) == (1.0, '{"math": 1.0}')


def test_a_step_that_is_taken_again_replaces_its_file(tmp_path: Path) -> None:
    write(tmp_path, 1, batch_of(group_of(0, 1.0, 0.0)))
    again = batch_of(group_of(0, 0.0, 1.0))
    path = write(tmp_path, 1, again)
    assert read_traces(tmp_path, 1) == list(again.groups)
    assert [file.name for file in path.parent.iterdir()] == ["step1.parquet"]


def test_a_step_without_a_trace_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no traces; it had --no_save_traces, or has taken no step"):
        read_traces(tmp_path, 1)
    for step in (2, 10):
        write(tmp_path, step, batch_of(group_of(0, 1.0)))
    with pytest.raises(InputError, match=r"step3\.parquet does not exist: there are traces of steps 2, 10"):
        read_traces(tmp_path, 3)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1, batch_of(group_of(0, 1.0)))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read as a trace of ours"):
        read_traces(tmp_path, 1)


def test_a_folder_that_cannot_be_written_is_a_failure_of_the_run(tmp_path: Path) -> None:
    trace_file(tmp_path, 1).parent.write_text("in the way")
    with pytest.raises(RunError, match="cannot be written"):
        write(tmp_path, 1, batch_of(group_of(0, 1.0)))


# --- how many are kept ----------------------------------------------------------------------------------


def take_steps(folder: Path, *steps: int, asked: bool | None = None) -> list[str]:
    """A run, or one that goes on, with those steps; what it warned of."""
    told: list[str] = []
    traces = Traces(folder, asked=asked, warn=told.append)
    batch = batch_of(group_of(0, 1.0, 0.0))
    for step in steps:
        traces.add(step, batch, training_samples(batch, config=CONFIG, version=step - 1))
    return told


def steps_in(folder: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("step")) for file in (folder / "traces").glob("step*.parquet"))


@pytest.fixture
def room_for_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(group_of(0, 1.0, 0.0))
    (tmp_path / "one").mkdir()
    size = write(tmp_path / "one", 1, batch).stat().st_size
    monkeypatch.setattr("open_instruct.rollout.traces.MOST_BYTES", 3 * size + size // 2)


def test_unasked_the_newest_that_fit_are_kept(room_for_three: None, tmp_path: Path) -> None:
    assert take_steps(tmp_path, *range(1, 12)) == []
    assert steps_in(tmp_path) == [9, 10, 11]
    assert len(read_traces(tmp_path, 9)) == 1


def test_the_newest_is_kept_however_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("open_instruct.rollout.traces.MOST_BYTES", 1)
    take_steps(tmp_path, 1, 2)
    assert steps_in(tmp_path) == [2]


def test_a_run_that_goes_on_from_an_earlier_step(room_for_three: None, tmp_path: Path) -> None:
    """Steps that are taken again replace their files, also where later ones are still there."""
    take_steps(tmp_path, *range(1, 6))
    take_steps(tmp_path, 4)
    assert steps_in(tmp_path) == [3, 4, 5]
    take_steps(tmp_path, 2)
    assert steps_in(tmp_path) == [2, 4, 5]
    take_steps(tmp_path, *range(3, 7))
    assert steps_in(tmp_path) == [4, 5, 6]


def test_asked_for_all_are_kept_and_asked_for_none_none_is_written(room_for_three: None, tmp_path: Path) -> None:
    take_steps(tmp_path, *range(1, 8), asked=True)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    take_steps(tmp_path, 8, asked=False)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_what_was_asked_for_stays_where_the_run_goes_on_unasked(room_for_three: None, tmp_path: Path) -> None:
    take_steps(tmp_path, *range(1, 6), asked=True)
    take_steps(tmp_path, *range(6, 12))
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 9, 10, 11]


def test_a_full_disk_ends_only_a_run_that_was_asked_for_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
