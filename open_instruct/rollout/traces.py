"""Every step's rollouts on disk, one parquet file a step and one row a completion, and back again without loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.data.foreign_json import one_line
from open_instruct.errors import InputError, RunError
from open_instruct.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.rollout.samples import RolloutStepBatch, StepSamples

if TYPE_CHECKING:
    import pyarrow

FOLDER = "traces"


def trace_file(run_folder: Path, step: int) -> Path:
    """Where the rollouts of `step` (1-based) are."""
    return run_folder / FOLDER / f"step{step}.parquet"


def write_traces(run_folder: Path, step: int, batch: RolloutStepBatch, learned: StepSamples) -> Path:
    """Write the rollouts of `step`, those that active sampling rejected included, and what was learned from them.

    A step that is taken again after a restart replaces its file.

    Raises:
        RunError: the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    path = trace_file(run_folder, step)
    partial = path.with_suffix(".partial")
    table = pyarrow.Table.from_pylist(list(_rows(step, batch, learned)), schema=_schema())
    try:
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}; or leave --save_traces out") from error
    return path


def read_traces(run_folder: Path, step: int) -> list[RolloutGroup]:
    """The groups that step `step` had to learn from, exactly as they were.

    Raises:
        InputError: there is no such file, or it is none of ours.
    """
    from pyarrow import parquet

    path = trace_file(run_folder, step)
    if not path.exists():
        raise InputError(f"{path} does not exist: {_steps_there_are(run_folder)}")
    try:
        rows = parquet.read_table(path, schema=_schema()).to_pylist()
        rows = [row for row in rows if not row["rejected"]]
        for row in rows:
            _check_row(row)
        return [_group_of(list(of_ticket)) for _, of_ticket in groupby(rows, key=lambda row: row["ticket"])]
    except Exception as error:  # pyarrow's kinds of errors have no common ancestor, nor have those of a damaged row
        raise InputError(
            f"{path} cannot be read as a trace of ours: {one_line(error)}; copy it again, or take another step"
        ) from error


def _check_row(row: dict[str, Any]) -> None:
    lists = ("prompt_token_ids", "token_ids", "logprobs", "versions", "problems")
    empty = [name for name, value in row.items() if value is None and name != "advantage"]
    if empty or any(None in row[name] for name in lists):
        raise ValueError(f"a row has nothing in {', '.join(empty) or 'a place of a list'}")
    if not len(row["token_ids"]) == len(row["logprobs"]) == len(row["versions"]):
        raise ValueError("a row has token_ids, logprobs and versions of different lengths")
    if min((*row["prompt_token_ids"], *row["token_ids"]), default=0) < 0:
        raise ValueError("a row has a token id below 0")


def _schema() -> pyarrow.Schema:
    import pyarrow

    integers, text, real = pyarrow.int64(), pyarrow.string(), pyarrow.float64()
    return pyarrow.schema(
        [
            ("step", integers),
            ("ticket", integers),
            ("sample_index", integers),
            ("row_id", integers),
            ("prompt", text),
            ("prompt_token_ids", pyarrow.list_(pyarrow.int32())),
            ("checks", text),  # JSON
            ("completion", text),
            ("token_ids", pyarrow.list_(pyarrow.int32())),
            ("logprobs", pyarrow.list_(real)),
            ("versions", pyarrow.list_(pyarrow.int32())),
            ("finish_reason", text),
            ("seed", integers),
            ("reward", real),
            ("scores", text),  # JSON
            ("problems", pyarrow.list_(text)),
            ("advantage", real),  # none in a rejected group
            ("used_in_training", pyarrow.bool_()),
            ("rejected", pyarrow.bool_()),
        ]
    )


def _rows(step: int, batch: RolloutStepBatch, learned: StepSamples) -> Iterator[dict[str, Any]]:
    for group, advantages, is_used in zip(batch.groups, learned.advantages, learned.is_used, strict=True):
        for index, row in enumerate(_rows_of(step, group)):
            yield row | {"advantage": advantages[index], "used_in_training": is_used[index], "rejected": False}
    for group in batch.rejected:
        for row in _rows_of(step, group):
            yield row | {"advantage": None, "used_in_training": False, "rejected": True}


def _rows_of(step: int, group: RolloutGroup) -> Iterator[dict[str, Any]]:
    checks = json.dumps([asdict(check) for check in group.prompt.checks])
    for index, (completion, verdict) in enumerate(zip(group.completions, group.verdicts, strict=True)):
        yield {
            "step": step,
            "ticket": group.ticket,
            "sample_index": index,
            "row_id": group.prompt.row_id,
            "prompt": group.prompt.text,
            "prompt_token_ids": group.prompt.token_ids,
            "checks": checks,
            "completion": completion.text,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "versions": completion.versions,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
            "reward": verdict.reward,
            "scores": json.dumps(verdict.scores),
            "problems": verdict.problems,
        }


def _group_of(rows: list[dict[str, Any]]) -> RolloutGroup:
    first = rows[0]
    prompt = Prompt(
        row_id=first["row_id"],
        token_ids=tuple(first["prompt_token_ids"]),
        text=first["prompt"],
        checks=tuple(Check(**check) for check in json.loads(first["checks"])),
    )
    completions = tuple(
        Completion(
            token_ids=tuple(row["token_ids"]),
            logprobs=tuple(row["logprobs"]),
            versions=tuple(row["versions"]),
            text=row["completion"],
            finish_reason=row["finish_reason"],
            seed=row["seed"],
        )
        for row in rows
    )
    verdicts = tuple(
        Verdict(reward=row["reward"], scores=json.loads(row["scores"]), problems=tuple(row["problems"])) for row in rows
    )
    return RolloutGroup(ticket=first["ticket"], prompt=prompt, completions=completions, verdicts=verdicts)


def _steps_there_are(run_folder: Path) -> str:
    steps = sorted(
        int(file.stem.removeprefix("step"))
        for file in (run_folder / FOLDER).glob("step*.parquet")
        if file.stem.removeprefix("step").isdecimal()
    )
    if not steps:
        return "the run has no traces; they are written with --save_traces"
    listed = ", ".join(map(str, steps)) if len(steps) <= 10 else f"{steps[0]} to {steps[-1]} ({len(steps)} of them)"
    return f"there are traces of steps {listed}"
