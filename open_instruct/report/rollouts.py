"""Saved rollouts, packed for a page: text as one JSON, numbers a token as arrays, each compressed.

Arrays lie end to end, a completion after the other; `num_tokens` of the JSON says where each begins.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.report.run_files import RunFiles
from open_instruct.run.run_directory import is_number
from open_instruct.wording import counted

if TYPE_CHECKING:
    import pyarrow

FOLDER = "traces"
MAX_BYTES = 256 * 2**20  # of the files' columns; a page of more would be slow to open
OF_TOKENS = ("token_ids", "logprobs", "versions")
TEXTS = ("step", "ticket", "sample_index", "row_id", "completion", "finish_reason", "reward", "scores", "problems")
OF_TRAINING = ("advantage", "used_in_training", "rejected")
OF_PROMPTS = ("prompt", "checks")
COLUMNS = (*TEXTS, *OF_TRAINING, *OF_PROMPTS, *OF_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The rows of trace files, by column; `notes` say what was left out. `table` is None where there are none."""

    table: pyarrow.Table | None = None
    notes: tuple[str, ...] = ()


def read_rollouts(folder: Path, *, most: int) -> Rollouts:
    """The completions of a run's folder, of steps that lie evenly over the run where there are more than `most`."""
    import pyarrow
    from pyarrow import parquet

    files, notes = [], []
    for file in (folder / FOLDER).glob("step*.parquet") if most else ():
        try:
            metadata = parquet.read_metadata(file)
            step = int(file.stem.removeprefix("step"))
        except (pyarrow.ArrowException, OSError, ValueError):
            notes.append(f"{FOLDER}/{file.name} cannot be read, and is left out")
            continue
        num_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        files.append((step, file, metadata.num_rows, num_bytes))
    files.sort()
    num_rows, num_bytes = sum(rows for *_, rows, _ in files), sum(size for *_, size in files)
    every = max(1, -(-num_rows // max(1, most)), -(-num_bytes // MAX_BYTES))
    taken = files[::-every][::-1]  # the last one always
    tables = []
    for _, file, *_ in taken:
        try:
            table = parquet.ParquetFile(file).read(columns=list(COLUMNS))
            _check(table)
            tables.append(table)
        except (pyarrow.ArrowException, OSError, ValueError):
            notes.append(f"{FOLDER}/{file.name} cannot be read, and is left out")
    if not tables:
        return Rollouts(notes=tuple(notes))
    table = pyarrow.concat_tables(tables, promote_options="permissive").combine_chunks()
    if every > 1:
        shown = f"{counted(len(table), 'rollout')} of {num_rows:,} are here: those of every {every}th step"
        notes.append(f"{shown}; --max_rollouts takes more")
    return Rollouts(table=table, notes=tuple(notes))


def packed_rollouts(run: RunFiles, rollouts: Rollouts) -> dict[str, str]:
    """By name, blocks of gzip in base64; none where the run left nothing to read."""
    blocks = {}
    columns: dict[str, list[Any]] = {}
    prompts: list[dict[str, Any]] = []
    pieces: dict[int, str] = {}
    if (table := rollouts.table) is not None:
        import numpy

        columns = table.select([*TEXTS, *OF_TRAINING]).to_pydict()
        columns["num_tokens"] = lengths_of(table).tolist()
        columns["prompt"], prompts = _prompts(table)
        token_ids = flat(table, "token_ids").astype("<u4")
        thousandths = numpy.nan_to_num(flat(table, "logprobs") * 1000, neginf=-numpy.inf)
        blocks["token_ids"] = packed(token_ids.tobytes())
        blocks["logprobs"] = packed(thousandths.clip(-32768, 32767).round().astype("<i2").tobytes())
        blocks["versions"] = packed(flat(table, "versions").astype("<u4").tobytes())
        pieces = _texts_of_tokens(run, numpy.unique(token_ids).tolist())
    for evaluation in run.evaluations:
        for sample in evaluation.get("samples") or ():
            _add_held_out(columns, prompts, evaluation["step"], sample)
    if columns:
        for name in ("reward", "advantage"):
            columns[name] = [value if is_number(value) else None for value in columns.get(name, [])]
        text = {"columns": columns, "prompts": prompts, "pieces": pieces}
        blocks["text"] = packed(json.dumps(text, allow_nan=False).encode())
    return blocks


def packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, compresslevel=1, mtime=0)).decode("ascii")


def flat(table: pyarrow.Table, column: str) -> Any:
    """The values of a column of lists, end to end."""
    return table[column].combine_chunks().flatten().fill_null(0).to_numpy(zero_copy_only=False)


def lengths_of(table: pyarrow.Table, column: str = "token_ids") -> Any:
    from pyarrow import compute

    return compute.list_value_length(table[column].combine_chunks()).fill_null(0).to_numpy(zero_copy_only=False)


def _check(table: pyarrow.Table) -> None:
    if missing := set(COLUMNS) - set(table.column_names):
        raise ValueError(f"no column {min(missing)}")
    lengths = [lengths_of(table, name) for name in OF_TOKENS]
    if any((other != lengths[0]).any() for other in lengths[1:]):
        raise ValueError("a row has token_ids, logprobs and versions of different lengths")


def _prompts(table: pyarrow.Table) -> tuple[list[int], list[dict[str, Any]]]:
    """Of each row the number of its prompt, and the prompts, each once."""
    numbers: dict[tuple[str, str], int] = {}
    rows = zip(*(table[name].to_pylist() for name in OF_PROMPTS), strict=True)
    prompt_numbers = [numbers.setdefault(row, len(numbers)) for row in rows]
    return prompt_numbers, [dict(zip(OF_PROMPTS, prompt, strict=True)) for prompt in numbers]


def _add_held_out(
    columns: dict[str, list[Any]], prompts: list[dict[str, Any]], step: float, sample: Mapping[str, Any]
) -> None:
    """An answer of an evaluation as one more row; what only a rollout has is None."""
    length = len(next(iter(columns.values()), []))
    row = {name: sample.get(name) for name in ("row_id", "completion", "finish_reason", "reward")}
    row |= {"step": step, "scores": json.dumps(sample.get("scores", {})), "prompt": len(prompts), "held_out": True}
    prompts.append({"prompt": sample.get("prompt"), "checks": json.dumps(sample.get("ground_truth"))})
    for name in {**columns, **row, "num_tokens": None}:
        columns.setdefault(name, [None] * length).append(0 if name == "num_tokens" else row.get(name))


def _texts_of_tokens(run: RunFiles, token_ids: Sequence[int]) -> dict[int, str]:
    """By token id, where a tokenizer of the run is still there."""
    from tokenizers import Tokenizer

    named = [run.config.get(name) for name in ("tokenizer_name_or_path", "model_name_or_path")]
    for folder in (
        run.folder / "hf_model",
        run.folder / "adapter",
        *(Path(name) for name in named if isinstance(name, str)),
    ):
        if (folder / "tokenizer.json").is_file():
            try:
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception:  # the library's errors have no class of their own
                continue
            known = tokenizer.get_vocab_size()
            return {each: tokenizer.decode([each], skip_special_tokens=False) for each in token_ids if each < known}
    return {}
