"""Reads the files in a run's folder for its page.

Damaged lines and files are passed over, and nothing is written.

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
from itertools import chain
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
from open_instruct.core.text import spell_count
from open_instruct.data.files.unfolding import check_unfolding
from open_instruct.report.run_forms import PlannedMemory, parse_layout, parse_plan, read_form
from open_instruct.report.turn_tree import write_turns
from open_instruct.run.run_directory import RunDirectory, RunState, is_number, read_rows

FOLDER = "traces"
MAX_BYTES = 256 * 2**20  # of the files' columns; a page of more would be slow to open
TOKEN_COLUMNS = ("token_ids", "logprobs", "versions")
TEXT_COLUMNS = (
    "step",
    "ticket",
    "sample_index",
    "row_id",
    "prompt",
    "checks",
    "completion",
    "finish_reason",
    "reward",
    "scores",
    "problems",
    "advantage",
    "used_in_training",
    "rejected",
)
COLUMNS = (*TEXT_COLUMNS, *TOKEN_COLUMNS, "episode")
# What the page shows of a held-out answer.
SAMPLE_FIELDS = ("row_id", "prompt", "completion", "finish_reason", "reward")
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
        """Read the files of a run.

        :raises InputError: there is no run in the folder, or its config.yaml cannot be read.
        """
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
        config: dict[str, Any] = {}
        made_with: tuple[str, ...] = ()
        if directory.config.is_file():
            config, made_with = _read_config(directory.config)
        return cls(
            folder=folder,
            config=config,
            made_with=made_with,
            rows=list(read_rows(directory.metrics)),
            evaluations=list(read_rows(directory.evaluations)),
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
            num_episodes = self.config.get("total_episodes")
            if num_episodes:
                num_prompts = self.config["num_unique_prompts_rollout"]
                num_samples = self.config["num_samples_per_prompt_rollout"]
                num_steps = max(1, num_episodes // (num_prompts * num_samples))
            if is_number(num_steps):
                return num_steps
        return None

    def numbers(self, name: str) -> list[float]:
        """A column of the steps, without what is missing or not finite."""
        return [row[name] for row in self.rows if is_number(row.get(name))]


def find_differing_flags(runs: list[RunFiles]) -> Iterator[tuple[str, list[Any]]]:
    """Yield every flag that differs, and its value in each run (`ABSENT` without such a flag)."""
    for name in dict.fromkeys(chain.from_iterable(run.config for run in runs)):
        values = [run.config.get(name, ABSENT) for run in runs]
        if any(value != values[0] for value in values):
            yield name, values


def _read_config(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The flags in config.yaml, and the lines of the comment at its head.

    :raises InputError: it cannot be read, or is made to cost a reader more than its size.
    """
    try:
        text = read_whole(path, most=MAX_YAML_BYTES).decode("utf-8", "replace")
        check_depth(text)
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in events):
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
    made_with = tuple(line.removeprefix("# ") for line in head)
    if not isinstance(config, dict):
        config = {}
    return config, made_with


def read_rollouts(folder: Path, *, most: int) -> tuple[pyarrow.Table | None, list[str]]:
    """The completions in a run's folder by column, or None; and a sentence on what was left out.

    If there are more than `most`, they are those of every second (third, ...) step.
    """
    if most == 0:
        return None, []
    files = []
    unreadable = []
    for path in (folder / FOLDER).glob("step*.parquet"):
        try:
            step = int(path.stem.removeprefix("step"))
            files.append((step, path, parquet.read_metadata(path)))
        except UNREADABLE:
            unreadable.append(path.name)
    files.sort(key=lambda file: file[0])
    num_rows = sum(metadata.num_rows for _, _, metadata in files)
    num_bytes = sum(_num_bytes(metadata) for _, _, metadata in files)
    every = max(1, -(-num_rows // most), -(-num_bytes // MAX_BYTES))
    tables = []
    for _, path, _ in files[::-every][::-1]:  # the last one always
        try:
            tables.append(_read_table(path))
        except UNREADABLE:
            unreadable.append(path.name)
    notes = [f"{FOLDER}/{name} cannot be read, and is left out" for name in unreadable]
    if not tables:
        return None, notes
    table = pyarrow.concat_tables(tables, promote_options="permissive").combine_chunks()
    if every > 1:
        extent = (
            f"{spell_count(len(table), 'rollout')} of {num_rows:,} are here: those of every "
            f"{every}th step"
        )
        notes.append(f"{extent}; --max_rollouts takes more")
    return table, notes


def pack_rollouts(run: RunFiles, table: pyarrow.Table | None) -> dict[str, str]:
    """Blocks of gzip in base64 by name; empty if the run left nothing to read."""
    blocks: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    pieces: dict[int, str] = {}
    if table is not None:
        rows = _build_rows(table)
        token_ids = flatten_column(table, "token_ids").astype("<u4")
        thousandths = numpy.nan_to_num(flatten_column(table, "logprobs") * 1000, neginf=-numpy.inf)
        logprobs = thousandths.clip(-32768, 32767).round().astype("<i2")
        versions = flatten_column(table, "versions").astype("<u4")
        blocks["token_ids"] = _compress(token_ids.tobytes())
        blocks["logprobs"] = _compress(logprobs.tobytes())
        blocks["versions"] = _compress(versions.tobytes())
        pieces = _decode_tokens(run, numpy.unique(token_ids).tolist())
    for evaluation in run.evaluations:
        rows += [_build_held_out_row(evaluation["step"], each) for each in _samples(evaluation)]
    for row in rows:
        for name in ("reward", "advantage"):
            if not is_number(row[name]):
                row[name] = None
    if rows:
        text = json.dumps({"rows": rows, "pieces": pieces}, allow_nan=False)
        blocks["text"] = _compress(text.encode())
    return blocks


def _build_rows(table: pyarrow.Table) -> list[dict[str, Any]]:
    """The texts of completions; that of an episode is its whole conversation."""
    rows: list[dict[str, Any]] = table.select([*TEXT_COLUMNS, "episode"]).to_pylist()
    for row, num_tokens in zip(rows, list_lengths(table).tolist(), strict=True):
        row["num_tokens"] = num_tokens
        episode = row.pop("episode")
        if episode is not None:
            row["completion"] = _write_conversation(episode)
    return rows


def _samples(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    samples = evaluation.get("samples")
    if not isinstance(samples, list):
        return []
    return [sample for sample in samples if isinstance(sample, dict)]


def _build_held_out_row(step: float, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an evaluation as a row, which is without a group and without tokens."""
    row = {name: sample.get(name) for name in SAMPLE_FIELDS}
    texts = {
        "scores": json.dumps(sample.get("scores", {})),
        "checks": json.dumps(sample.get("ground_truth")),
    }
    return (
        row
        | texts
        | {
            "step": step,
            "advantage": None,
            "num_tokens": 0,
            "held_out": True,
        }
    )


def _write_conversation(episode: str) -> str:
    """The turns of an episode after the row's prompt, as one text."""
    fields = json.loads(episode)
    turns = fields["turns"]
    roles = [turn["role"] for turn in turns]
    first = roles.index("assistant") if "assistant" in roles else len(turns)
    if fields["prompt_token_ids"]:
        first = max(first - 1, 0)
    return "\n\n".join([*write_turns(turns, first=first), f"[{fields['status']}]"])


def _compress(content: bytes) -> str:
    """The content as gzip in base64."""
    return base64.b64encode(gzip.compress(content, compresslevel=1, mtime=0)).decode("ascii")


def flatten_column(table: pyarrow.Table, column: str) -> numpy.ndarray:
    """The values of a column of lists, end to end."""
    return table[column].combine_chunks().flatten().fill_null(0).to_numpy(zero_copy_only=False)


def list_lengths(table: pyarrow.Table, column: str = "token_ids") -> numpy.ndarray:
    """The length of each list in a column; 0 where there is none."""
    lengths = compute.list_value_length(table[column].combine_chunks())
    return lengths.fill_null(0).to_numpy(zero_copy_only=False)


def _num_bytes(metadata: parquet.FileMetaData) -> int:
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(group.total_byte_size for group in groups)


def _read_table(path: Path) -> pyarrow.Table:
    check_unfolding(path)
    table = parquet.read_table(path, columns=list(COLUMNS))  # which refuses a file that lacks one
    lengths = list_lengths(table)
    if any((list_lengths(table, name) != lengths).any() for name in TOKEN_COLUMNS):
        raise ValueError("a row has token_ids, logprobs and versions of different lengths")
    return table


def _decode_tokens(run: RunFiles, token_ids: Sequence[int]) -> dict[int, str]:
    """The text of each token; empty if no tokenizer of the run is left."""
    from tokenizers import Tokenizer

    folders = [run.folder / "hf_model", run.folder / "adapter"]
    for flag in ("tokenizer_name_or_path", "model_name_or_path"):
        name = run.config.get(flag)
        if isinstance(name, str):
            folders.append(Path(name))
    for folder in folders:
        # A file that is not there, or damaged: the library's errors have no class.
        with suppress(Exception):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            vocab_size = tokenizer.get_vocab_size()
            known_ids = [each for each in token_ids if each < vocab_size]
            return {each: tokenizer.decode([each], skip_special_tokens=False) for each in known_ids}
    return {}
