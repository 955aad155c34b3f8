"""Rollouts on disk: a parquet file for each step, with a row for each completion, read exactly."""

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
from open_instruct.core.records import Completion, Episode, RolloutGroup
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
OF_PROMPT = {
    "row_id": "row_id",
    "prompt": "text",
    "prompt_token_ids": "token_ids",
}
OF_COMPLETION = {
    "completion": "text",
    "token_ids": "token_ids",
    "finish_reason": "finish_reason",
    "seed": "seed",
}


class Traces:
    """Writes the rollouts of a run: of every step, of no step, or of the newest ones.

    Without the flag those of the newest steps stay that fit in MOST_BYTES.

    Args:
        save_traces: the flag `--save_traces`. With it a failure to write ends the run; without it a
            failure is a warning.
    """

    def __init__(
        self, run_folder: Path, *, save_traces: bool | None, warn: Callable[[str], None]
    ) -> None:
        self.run_folder = run_folder
        self.save_traces = save_traces
        self.warn = warn
        # An earlier start with --save_traces may have written more than MOST_BYTES; those files
        # stay.
        sizes = _find_sizes(run_folder)
        self._protected_steps: set[int] = set()
        if sum(sizes.values()) > MOST_BYTES:
            self._protected_steps = set(sizes)

    def add(self, step: int, batch: RolloutStepBatch, step_samples: StepSamples) -> None:
        """Write the rollouts of `step`, the newest; without the flag old files make room for them.

        Raises:
            RunError: they cannot be written, and the flag is given.
        """
        if self.save_traces is False:
            return
        try:
            write_traces(self.run_folder, step, batch, step_samples)
            if self.save_traces is None:
                self._make_room(step)
        except Exception as error:  # the traces are optional here, so no failure may end the run
            if self.save_traces:
                raise
            self.warn(f"{one_line(error)}; the run goes on, and writes no more traces")
            self.save_traces = False

    def _make_room(self, num_new_bytes: int) -> None:
        sizes = _find_sizes(self.run_folder)
        num_bytes = sizes[num_new_bytes]
        for step in sorted(sizes.keys() - self._protected_steps - {num_new_bytes}, reverse=True):
            num_bytes += sizes[step]
            if num_bytes > MOST_BYTES:
                trace_file(self.run_folder, step).unlink()


def trace_file(run_folder: Path, step: int) -> Path:
    """The path of the rollouts of `step` (1-based)."""
    return run_folder / FOLDER / f"step{step}.parquet"


def write_traces(
    run_folder: Path,
    step: int,
    batch: RolloutStepBatch,
    step_samples: StepSamples,
) -> Path:
    """Write the rollouts of `step`, also the rejected ones, and what was learned from them.

    A step that is taken again after a restart replaces its file.

    Raises:
        RunError: the file cannot be written.
    """
    path = trace_file(run_folder, step)
    partial = path.with_suffix(".partial")
    table = pyarrow.Table.from_pylist(list(_make_rows(step, batch, step_samples)), schema=SCHEMA)
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
    """Read the groups that `step` had to learn from, exactly as they were.

    Raises:
        InputError: there is no such file, or it is none of ours.
    """
    path = trace_file(run_folder, step)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: {_describe_steps(run_folder)}", kind="missing_file"
        )
    try:
        check_unfolding(path)
        all_rows = parquet.read_table(path, schema=SCHEMA).to_pylist()
        rows = [row for row in all_rows if not row["rejected"]]
        for row in rows:
            _check_row(row)
        rows_by_ticket = groupby(rows, key=lambda row: row["ticket"])
        groups = [_make_group(list(ticket_rows)) for _, ticket_rows in rows_by_ticket]
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


def _make_rows(
    step: int, batch: RolloutStepBatch, step_samples: StepSamples
) -> Iterator[dict[str, Any]]:
    of_groups = zip(batch.groups, step_samples.advantages, step_samples.is_used, strict=True)
    for group, advantages, is_used in of_groups:
        rows = zip(_make_group_rows(step, group), advantages, is_used, strict=True)
        for row, advantage, was_used in rows:
            yield row | {
                "advantage": advantage,
                "used_in_training": was_used,
                "rejected": False,
            }
    for group in batch.rejected:
        for row in _make_group_rows(step, group):
            yield row | {
                "advantage": None,
                "used_in_training": False,
                "rejected": True,
            }


def _make_group_rows(step: int, group: RolloutGroup) -> Iterator[dict[str, Any]]:
    checks = json.dumps([asdict(check) for check in group.prompt.checks])
    answers = zip(group.completions, group.verdicts, strict=True)
    for index, (completion, verdict) in enumerate(answers):
        episode = None
        if completion.episode is not None:
            episode = json.dumps(_describe_episode(completion.episode))
        yield {
            "step": step,
            "ticket": group.ticket,
            "sample_index": index,
            "checks": checks,
            **{column: getattr(group.prompt, field) for column, field in OF_PROMPT.items()},
            **{column: getattr(completion, field) for column, field in OF_COMPLETION.items()},
            "logprobs": _spread_over_tokens(completion, completion.logprobs, 0.0),
            "versions": _spread_over_tokens(completion, completion.versions, 0),
            "episode": episode,
            "reward": verdict.reward,
            "scores": json.dumps(verdict.scores),
            "problems": verdict.problems,
        }


def _describe_episode(episode: Episode) -> dict[str, Any]:
    """An episode as JSON holds it; as of completions, the experts of branches are left out."""
    fields = asdict(episode)
    for branch in fields["branches"]:
        del branch["routes"]
    return fields


def _make_group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    prompt = {field: first[column] for column, field in OF_PROMPT.items()}
    return {
        "ticket": first["ticket"],
        "prompt": {**prompt, "checks": json.loads(first["checks"])},
        "completions": list(map(_make_completion, rows)),
        # The record takes its own fields; other columns are ignored.
        "verdicts": [row | {"scores": json.loads(row["scores"])} for row in rows],
    }


def _spread_over_tokens(
    completion: Completion, values: Sequence[float], filling: float
) -> list[float]:
    """The values of sampled tokens at their places, with `filling` at all others."""
    at_all = [filling] * len(completion.token_ids)
    num_done = 0
    for reply in completion.replies:
        at_all[reply.start : reply.stop] = values[num_done : num_done + len(reply)]
        num_done += len(reply)
    return at_all


def _make_completion(row: dict[str, Any]) -> dict[str, Any]:
    episode: Any = None
    replies = [{"start": 0, "stop": len(row["token_ids"])}]
    if row["episode"] is not None:
        episode = json.loads(row["episode"])
        replies = episode["replies"]
    logprobs: list[float] = []
    versions: list[int] = []
    for reply in replies:
        if not 0 <= reply["start"] <= reply["stop"] <= len(row["token_ids"]):
            raise ValueError("a reply of an episode is not within its tokens")
        logprobs += row["logprobs"][reply["start"] : reply["stop"]]
        versions += row["versions"][reply["start"] : reply["stop"]]
    fields = {field: row[column] for column, field in OF_COMPLETION.items()}
    return {
        **fields,
        "logprobs": logprobs,
        "versions": versions,
        "episode": episode,
    }


def _describe_steps(run_folder: Path) -> str:
    steps = sorted(_find_sizes(run_folder))
    if not steps:
        return "the run has no traces; it had --no_save_traces, or has taken no step"
    steps_text = f"{steps[0]} to {steps[-1]} ({len(steps)} of them)"
    if len(steps) <= 10:
        steps_text = ", ".join(map(str, steps))
    return f"there are traces of steps {steps_text}"


def _find_sizes(run_folder: Path) -> dict[int, int]:
    """The bytes of each step's file."""
    sizes: dict[int, int] = {}
    for file in (run_folder / FOLDER).glob("step*.parquet"):
        step = file.stem.removeprefix("step")
        if step.isdecimal():
            sizes[int(step)] = file.lstat().st_size
    return sizes
