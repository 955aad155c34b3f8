"""Rollouts on disk, one parquet file a step and one row a completion, and back again without
loss.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from pydantic import TypeAdapter

from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Completion, RolloutGroup
from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.unfolding import check_unfolding
from open_instruct.rl.samples import RolloutStepBatch, StepSamples

FOLDER = "traces"
MOST_BYTES = 2**30  # of the files, where `--save_traces` says nothing

SCHEMA = pyarrow.schema(
    {
        "step": pyarrow.int64(),
        "ticket": pyarrow.int64(),
        "sample_index": pyarrow.int64(),
        "row_id": pyarrow.int64(),
        "prompt": pyarrow.string(),
        "prompt_token_ids": pyarrow.list_(pyarrow.int32()),
        "checks": pyarrow.string(),  # JSON
        "completion": pyarrow.string(),
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "logprobs": pyarrow.list_(pyarrow.float64()),
        "versions": pyarrow.list_(pyarrow.int32()),
        "finish_reason": pyarrow.string(),
        "seed": pyarrow.int64(),
        "episode": pyarrow.string(),  # JSON; none where a completion is one turn
        "reward": pyarrow.float64(),
        "scores": pyarrow.string(),  # JSON
        "problems": pyarrow.list_(pyarrow.string()),
        "advantage": pyarrow.float64(),  # none in a rejected group
        "used_in_training": pyarrow.bool_(),
        "rejected": pyarrow.bool_(),
    }
)
# The field of a record that each column holds.
OF_PROMPT = {"row_id": "row_id", "prompt": "text", "prompt_token_ids": "token_ids"}
OF_COMPLETION = {
    "completion": "text",
    "token_ids": "token_ids",
    "finish_reason": "finish_reason",
    "seed": "seed",
}


class Traces:
    """Writes the rollouts of every step, of no step or, without the flag, of the newest steps that
    fit in MOST_BYTES.

    :param asked: `--save_traces`. With it a failure to write ends the run; without it a failure is
        a warning.
    """

    def __init__(
        self, run_folder: Path, *, asked: bool | None, warn: Callable[[str], None]
    ) -> None:
        self.run_folder = run_folder
        self.asked = asked
        self.warn = warn
        # An earlier start with --save_traces may have written more than MOST_BYTES; those files
        # stay.
        sizes = _sizes(run_folder)
        self._spared = sizes.keys() if sum(sizes.values()) > MOST_BYTES else set()

    def add(self, step: int, batch: RolloutStepBatch, learned: StepSamples) -> None:
        """Write the rollouts of `step`, the newest; without --save_traces the oldest files make
        room for them.

        Raises:
            RunError: they were asked for, and cannot be written.
        """
        if self.asked is False:
            return
        try:
            write_traces(self.run_folder, step, batch, learned)
            if self.asked is None:
                self._make_room(step)
        except Exception as error:  # the traces are optional here, so no failure may end the run
            if self.asked:
                raise
            self.warn(f"{one_line(error)}; the run goes on, and writes no more traces")
            self.asked = False

    def _make_room(self, written: int) -> None:
        sizes = _sizes(self.run_folder)
        num_bytes = sizes[written]
        for step in sorted(sizes.keys() - self._spared - {written}, reverse=True):
            num_bytes += sizes[step]
            if num_bytes > MOST_BYTES:
                trace_file(self.run_folder, step).unlink()


def trace_file(run_folder: Path, step: int) -> Path:
    """The path of the rollouts of `step` (1-based)."""
    return run_folder / FOLDER / f"step{step}.parquet"


def write_traces(
    run_folder: Path, step: int, batch: RolloutStepBatch, learned: StepSamples
) -> Path:
    """Write the rollouts of `step`, those that active sampling rejected included, and what was
    learned from them.

    A step that is taken again after a restart replaces its file.

    Raises:
        RunError: the file cannot be written.
    """
    path = trace_file(run_folder, step)
    partial = path.with_suffix(".partial")
    table = pyarrow.Table.from_pylist(list(_rows(step, batch, learned)), schema=SCHEMA)
    try:
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()  # frees the space of a full disk
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}; or give --no_save_traces"
        ) from error
    return path


def read_traces(run_folder: Path, step: int) -> list[RolloutGroup]:
    """The groups that step `step` had to learn from, exactly as they were.

    Raises:
        InputError: there is no such file, or it is none of ours.
    """
    path = trace_file(run_folder, step)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: {_steps_there_are(run_folder)}", kind="missing_file"
        )
    try:
        check_unfolding(path)
        rows = [
            row
            for row in parquet.read_table(path, schema=SCHEMA).to_pylist()
            if not row["rejected"]
        ]
        for row in rows:
            _check_row(row)
        groups = [
            _group_of(list(ticket_rows))
            for _, ticket_rows in groupby(rows, key=lambda row: row["ticket"])
        ]
        return TypeAdapter(list[RolloutGroup]).validate_python(groups)
    # Pyarrow's kinds of errors have no common ancestor, nor have those of a damaged row.
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as a trace of ours: {one_line(error)}; copy it again, or take "
            "another step",
            kind="unreadable_file",
        ) from error


def _check_row(row: dict[str, Any]) -> None:
    lists = ("prompt_token_ids", "token_ids", "logprobs", "versions", "problems")
    empty = [
        name
        for name, value in row.items()
        if value is None and name not in ("advantage", "episode")
    ]
    if empty or any(None in row[name] for name in lists):
        raise ValueError(f"a row has nothing in {', '.join(empty) or 'a place of a list'}")
    if not len(row["token_ids"]) == len(row["logprobs"]) == len(row["versions"]):
        raise ValueError("a row has token_ids, logprobs and versions of different lengths")
    if min((*row["prompt_token_ids"], *row["token_ids"]), default=0) < 0:
        raise ValueError("a row has a token id below 0")


def _rows(step: int, batch: RolloutStepBatch, learned: StepSamples) -> Iterator[dict[str, Any]]:
    for group, advantages, is_used in zip(
        batch.groups, learned.advantages, learned.is_used, strict=True
    ):
        for row, advantage, used in zip(
            _rows_of_group(step, group), advantages, is_used, strict=True
        ):
            yield row | {"advantage": advantage, "used_in_training": used, "rejected": False}
    for group in batch.rejected:
        for row in _rows_of_group(step, group):
            yield row | {"advantage": None, "used_in_training": False, "rejected": True}


def _rows_of_group(step: int, group: RolloutGroup) -> Iterator[dict[str, Any]]:
    checks = json.dumps([asdict(check) for check in group.prompt.checks])
    for index, (completion, verdict) in enumerate(
        zip(group.completions, group.verdicts, strict=True)
    ):
        yield {
            "step": step,
            "ticket": group.ticket,
            "sample_index": index,
            "checks": checks,
            **{column: getattr(group.prompt, field) for column, field in OF_PROMPT.items()},
            **{column: getattr(completion, field) for column, field in OF_COMPLETION.items()},
            "logprobs": _at_all_tokens(completion, completion.logprobs, 0.0),
            "versions": _at_all_tokens(completion, completion.versions, 0),
            "episode": None
            if completion.episode is None
            else json.dumps(asdict(completion.episode)),
            "reward": verdict.reward,
            "scores": json.dumps(verdict.scores),
            "problems": verdict.problems,
        }


def _group_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    prompt = {field: first[column] for column, field in OF_PROMPT.items()}
    return {
        "ticket": first["ticket"],
        "prompt": {**prompt, "checks": json.loads(first["checks"])},
        "completions": list(map(_completion_of, rows)),
        # Other columns are passed over.
        "verdicts": [row | {"scores": json.loads(row["scores"])} for row in rows],
    }


def _at_all_tokens(completion: Completion, values: Sequence[float], filling: float) -> list[float]:
    """The values of sampled tokens, with `filling` for the others."""
    at_all = [filling] * len(completion.token_ids)
    done = 0
    for reply in completion.replies:
        at_all[reply.start : reply.stop] = values[done : done + len(reply)]
        done += len(reply)
    return at_all


def _completion_of(row: dict[str, Any]) -> dict[str, Any]:
    episode = None if row["episode"] is None else json.loads(row["episode"])
    replies = (
        [{"start": 0, "stop": len(row["token_ids"])}] if episode is None else episode["replies"]
    )
    sampled = [at for reply in replies for at in range(reply["start"], reply["stop"])]
    fields = {field: row[column] for column, field in OF_COMPLETION.items()}
    of_sampled = {name: [row[name][at] for at in sampled] for name in ("logprobs", "versions")}
    return {**fields, **of_sampled, "episode": episode}


def _steps_there_are(run_folder: Path) -> str:
    steps = sorted(_sizes(run_folder))
    if not steps:
        return "the run has no traces; it had --no_save_traces, or has taken no step"
    listed = (
        ", ".join(map(str, steps))
        if len(steps) <= 10
        else f"{steps[0]} to {steps[-1]} ({len(steps)} of them)"
    )
    return f"there are traces of steps {listed}"


def _sizes(run_folder: Path) -> dict[int, int]:
    """By step, the bytes of its file."""
    files = {
        file.stem.removeprefix("step"): file for file in (run_folder / FOLDER).glob("step*.parquet")
    }
    return {int(step): file.lstat().st_size for step, file in files.items() if step.isdecimal()}
