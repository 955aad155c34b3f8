"""The files in a run's folder, read for its page. Damaged lines and files are passed over; nothing
is written.

Saved rollouts are packed for the page: text as one JSON, numbers of each token as arrays, all
compressed. An array has the tokens of all completions, one after the other; `num_tokens` in the
JSON says how many each has.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import yaml
from pyarrow import compute, parquet

from open_instruct.config.parser import MAX_YAML_BYTES
from open_instruct.config.yaml_depth import check_depth
from open_instruct.core.errors import InputError
from open_instruct.core.files import read_whole
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import counted
from open_instruct.data.files.unfolding import check_unfolding
from open_instruct.report.run_forms import PlannedMemory, parse_layout, parse_plan, read_form
from open_instruct.run.run_directory import RunDirectory, RunState, is_number, rows_of

FOLDER = "traces"
MAX_BYTES = 256 * 2**20  # of the files' columns; a page of more would be slow to open
OF_TOKENS = ("token_ids", "logprobs", "versions")
TEXTS = (
    *(
        "step",
        "ticket",
        "sample_index",
        "row_id",
        "prompt",
        "checks",
        "completion",
        "finish_reason",
    ),
    *("reward", "scores", "problems", "advantage", "used_in_training", "rejected"),
)
COLUMNS = (*TEXTS, *OF_TOKENS, "episode")
ABSENT = "(no such flag)"
UNREADABLE = (pyarrow.ArrowException, OSError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run as its files have it.

    `config` has the resolved flags, `made_with` the versions and the git state above them, `rows`
    the steps of metrics.jsonl, `evaluations` those of eval.jsonl. `layout` and `plan` are None
    where the run left none, or one of another form, of which `left_out` has a sentence.

    Example, of a run that was asked for four steps and has taken one::

        RunFiles(folder=Path("runs/a"), config={"max_train_steps": 4}, rows=[{"step": 1,
                 "loss": 0.69}])
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    made_with: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    layout: ShardLayout | None = None
    plan: PlannedMemory | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    state: RunState = "stopped"

    @property
    def has_ended(self) -> bool:
        return self.state == "ended"

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """:raises InputError: there is no run in the folder, or its config.yaml cannot be read."""
        directory = RunDirectory(path=folder)
        directory.refuse_foreign_files()
        if not (directory.config.is_file() or directory.metrics.is_file()):
            raise InputError(
                f"{folder} holds no run: it has neither config.yaml nor metrics.jsonl; give the "
                "--output_dir of a run",
                kind="missing_file",
            )
        layout, no_layout = read_form(directory.layout, parse_layout)
        plan, no_plan = read_form(directory.plan, parse_plan)
        config, made_with = (
            _settings_in(directory.config) if directory.config.is_file() else ({}, ())
        )
        return cls(
            folder=folder,
            config=config,
            made_with=made_with,
            rows=list(rows_of(directory.metrics)),
            evaluations=list(rows_of(directory.evaluations)),
            layout=layout,
            plan=plan,
            left_out={"layout": no_layout, "plan": no_plan},
            state=directory.find_state(),
        )

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run; None if the flags alone do not say it."""
        with suppress(KeyError, TypeError, ZeroDivisionError):
            num_steps = self.config.get("max_train_steps")
            if self.config.get("total_episodes"):
                per_step = (
                    self.config["num_unique_prompts_rollout"]
                    * self.config["num_samples_per_prompt_rollout"]
                )
                num_steps = max(1, self.config["total_episodes"] // per_step)
            return num_steps if is_number(num_steps) else None
        return None

    def numbers(self, name: str) -> list[float]:
        """A column of the steps, without what is missing or not finite."""
        return [row[name] for row in self.rows if is_number(row.get(name))]


def differing_flags(runs: list[RunFiles]) -> Iterator[tuple[str, list[Any]]]:
    """Yields every flag that differs, and its value in each run:

    `ABSENT` where a run has no such flag.
    """
    names = dict.fromkeys(name for run in runs for name in run.config)
    for name in names:
        values = [run.config.get(name, ABSENT) for run in runs]
        if any(value != values[0] for value in values):
            yield name, values


def _settings_in(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The flags in config.yaml, and the lines of the comment at its head.

    :raises InputError: it cannot be read, or is made to cost a reader more than its size.
    """
    try:
        text = read_whole(path, most=MAX_YAML_BYTES).decode("utf-8", "replace")
        check_depth(text)
        if any(
            isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)
        ):
            raise ValueError("it has aliases, of which a small file makes a large page")
        config = yaml.safe_load(text)
        str(config)  # fails where a number has more digits than Python writes
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InputError(
            f"{path} cannot be read as YAML: {reason}. Move it away for a page without flags",
            kind="unreadable_file",
        ) from error
    head = text.partition("\n\n")[0].splitlines()
    return config if isinstance(config, dict) else {}, tuple(
        line.removeprefix("# ") for line in head
    )


def read_rollouts(folder: Path, *, most: int) -> tuple[pyarrow.Table | None, list[str]]:
    """The completions in a run's folder by column, or None; and a sentence on what was left out.

    If there are more than `most`, they are those of every second (third, ...) step.
    """
    if most == 0:
        return None, []
    files, unreadable = [], []
    for path in (folder / FOLDER).glob("step*.parquet"):
        try:
            files.append((int(path.stem.removeprefix("step")), path, parquet.read_metadata(path)))
        except UNREADABLE:
            unreadable.append(path.name)
    files.sort(key=lambda file: file[0])
    num_rows = sum(metadata.num_rows for _, _, metadata in files)
    num_bytes = sum(_num_bytes(metadata) for _, _, metadata in files)
    every = max(1, -(-num_rows // most), -(-num_bytes // MAX_BYTES))
    tables = []
    for _, path, _ in files[::-every][::-1]:  # the last one always
        try:
            tables.append(_read(path))
        except UNREADABLE:
            unreadable.append(path.name)
    notes = [f"{FOLDER}/{name} cannot be read, and is left out" for name in unreadable]
    if not tables:
        return None, notes
    table = pyarrow.concat_tables(tables, promote_options="permissive").combine_chunks()
    if every > 1:
        shown = (
            f"{counted(len(table), 'rollout')} of {num_rows:,} are here: those of every "
            f"{every}th step"
        )
        notes.append(f"{shown}; --max_rollouts takes more")
    return table, notes


def packed_rollouts(run: RunFiles, table: pyarrow.Table | None) -> dict[str, str]:
    """Blocks of gzip in base64 by name; empty if the run left nothing to read."""
    blocks = {}
    rows: list[dict[str, Any]] = []
    pieces: dict[int, str] = {}
    if table is not None:
        rows = table.select([*TEXTS, "episode"]).to_pylist()
        for row, num_tokens in zip(rows, lengths_of(table).tolist(), strict=True):
            row["num_tokens"] = num_tokens
            if (episode := row.pop("episode")) is not None:
                row["completion"] = _conversation(episode)
        token_ids = flat(table, "token_ids").astype("<u4")
        thousandths = numpy.nan_to_num(flat(table, "logprobs") * 1000, neginf=-numpy.inf)
        blocks["token_ids"] = packed(token_ids.tobytes())
        blocks["logprobs"] = packed(thousandths.clip(-32768, 32767).round().astype("<i2").tobytes())
        blocks["versions"] = packed(flat(table, "versions").astype("<u4").tobytes())
        pieces = _texts_of_tokens(run, numpy.unique(token_ids).tolist())
    rows += [_held_out(row["step"], sample) for row in run.evaluations for sample in _samples(row)]
    for row in rows:
        row |= {
            name: row[name] if is_number(row[name]) else None for name in ("reward", "advantage")
        }
    if rows:
        blocks["text"] = packed(
            json.dumps({"rows": rows, "pieces": pieces}, allow_nan=False).encode()
        )
    return blocks


def _samples(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    samples = evaluation.get("samples")
    return [each for each in samples if isinstance(each, dict)] if isinstance(samples, list) else []


def _held_out(step: float, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an evaluation as a row, which is without a group and without tokens."""
    row = {
        name: sample.get(name)
        for name in ("row_id", "prompt", "completion", "finish_reason", "reward")
    }
    texts = {
        "scores": json.dumps(sample.get("scores", {})),
        "checks": json.dumps(sample.get("ground_truth")),
    }
    return row | texts | {"step": step, "advantage": None, "num_tokens": 0, "held_out": True}


def _conversation(episode: str) -> str:
    """The turns of an episode behind the row's own, to be read one after the other."""
    fields = json.loads(episode)
    turns = fields["turns"]
    first = next((at for at, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    opening = turns[first - 1 : first] if fields["prompt_token_ids"] else []
    said = [f"[{turn['role']}]\n{turn['content']}" for turn in (*opening, *turns[first:])]
    return "\n\n".join([*said, f"[{fields['status']}]"])


def packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, compresslevel=1, mtime=0)).decode("ascii")


def flat(table: pyarrow.Table, column: str) -> numpy.ndarray:
    """The values of a column of lists, end to end."""
    return table[column].combine_chunks().flatten().fill_null(0).to_numpy(zero_copy_only=False)


def lengths_of(table: pyarrow.Table, column: str = "token_ids") -> numpy.ndarray:
    return (
        compute.list_value_length(table[column].combine_chunks())
        .fill_null(0)
        .to_numpy(zero_copy_only=False)
    )


def _num_bytes(metadata: parquet.FileMetaData) -> int:
    return sum(
        metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)
    )


def _read(path: Path) -> pyarrow.Table:
    check_unfolding(path)
    table = parquet.read_table(path, columns=list(COLUMNS))  # which refuses a file that lacks one
    if any((lengths_of(table, name) != lengths_of(table)).any() for name in OF_TOKENS):
        raise ValueError("a row has token_ids, logprobs and versions of different lengths")
    return table


def _texts_of_tokens(run: RunFiles, token_ids: Sequence[int]) -> dict[int, str]:
    """The text of each token; empty if no tokenizer of the run is left."""
    from tokenizers import Tokenizer

    folders = [run.folder / "hf_model", run.folder / "adapter"]
    names = [run.config.get(name) for name in ("tokenizer_name_or_path", "model_name_or_path")]
    for folder in [*folders, *(Path(name) for name in names if isinstance(name, str))]:
        # A file that is not there, or damaged: the library's errors have no class.
        with suppress(Exception):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            known = tokenizer.get_vocab_size()
            return {
                each: tokenizer.decode([each], skip_special_tokens=False)
                for each in token_ids
                if each < known
            }
    return {}
