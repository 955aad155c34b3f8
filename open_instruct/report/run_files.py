"""The files in a run's folder, read for its page. Damaged lines and files are passed over; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from open_instruct.config.parser import MAX_YAML_BYTES
from open_instruct.errors import InputError
from open_instruct.run.run_directory import RunDirectory, is_number, rows_of
from open_instruct.whole_file import read_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run as its files have it.

    `config` has the resolved flags, `made_with` the versions and the git state above them, `rows` the steps of
    metrics.jsonl, `evaluations` those of eval.jsonl. `layout` and `plan` are empty where the run left none.

    Example, of a run that was asked for four steps and has taken one::

        RunFiles(name="a", folder=Path("runs/a"), rows=[{"step": 1, "loss": 0.69}], num_steps=4)
    """

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    made_with: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    layout: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int | None = None
    has_ended: bool = False

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """:raises InputError: there is no run in the folder, or its config.yaml cannot be read."""
        directory = RunDirectory(path=folder)
        directory.refuse_others()
        if not (directory.config.is_file() or directory.metrics.is_file()):
            raise InputError(
                f"{folder} holds no run: it has neither config.yaml nor metrics.jsonl; give the --output_dir of a run"
            )
        config, made_with = _settings_in(directory.config) if directory.config.is_file() else ({}, ())
        return cls(
            name=folder.resolve().name,
            folder=folder,
            config=config,
            made_with=made_with,
            rows=list(rows_of(directory.metrics)),
            evaluations=list(rows_of(directory.evaluations)),
            layout=_object_in(directory.layout, "warnings"),
            plan=_object_in(directory.plan, "peak_phase"),
            num_steps=_num_steps(config),
            has_ended=directory.hf_model.exists() or directory.adapter.exists(),
        )

    def numbers(self, name: str) -> list[float]:
        """A column of the steps, without what is missing or not finite."""
        return [row[name] for row in self.rows if is_number(row.get(name))]


def differing_flags(runs: list[RunFiles]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the flags that all runs have with different values, and the value in each run."""
    for name in runs[0].config:
        values = [run.config[name] for run in runs if name in run.config]
        if len(values) == len(runs) and any(value != values[0] for value in values):
            yield name, values


def _settings_in(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The flags in config.yaml, and the lines of the comment at its head.

    :raises InputError: it cannot be read, or is made to cost a reader more than its size.
    """
    try:
        text = read_whole(path, most=MAX_YAML_BYTES).decode("utf-8", "replace")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it has aliases, of which a small file makes a large page")
        config = yaml.safe_load(text)
        str(config)  # fails where a number has more digits than Python writes
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InputError(
            f"{path} cannot be read as YAML: {reason}. Move it away for a page without its flags"
        ) from error
    head = text.partition("\n\n")[0].splitlines()
    return config if isinstance(config, dict) else {}, tuple(line.removeprefix("# ") for line in head)


def _num_steps(config: Mapping[str, Any]) -> int | None:
    """The number of steps of the whole run; None if the flags alone do not say it."""
    try:
        num_steps = config.get("max_train_steps")
        if config.get("total_episodes"):
            per_step = config["num_unique_prompts_rollout"] * config["num_samples_per_prompt_rollout"]
            num_steps = max(1, config["total_episodes"] // per_step)
        return num_steps if is_number(num_steps) else None
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _object_in(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged, or is another, without `key`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) and key in value else {}
