"""What a finished run says last: what was learned, where the model is, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table

from open_instruct.config.training import LearnerConfig
from open_instruct.data.files.foreign_json import read_object
from open_instruct.metric_table import followed, in_order
from open_instruct.run.console import Console, time_words
from open_instruct.run.run_directory import RunDirectory, exported_by, is_number, rows_of
from open_instruct.wording import counted

NUM_HELD_OUT = 3  # of the table of metrics the first, which are what the objective is about


def say_what_happened(config: LearnerConfig, *, took_s: float) -> None:
    """In a frame on a terminal, in plain lines elsewhere; nothing where no model was exported."""
    directory, model = RunDirectory(path=Path(config.run.output_dir)), exported_by(config)
    rows, evaluations = list(rows_of(directory.metrics)), list(rows_of(directory.evaluations))
    if not rows or not model.exists():
        return
    facts = {
        f"{counted(rows[-1]['step'], 'step')}": learned_words(rows),
        "held out": held_out_words(evaluations) if evaluations else "",
        "time": time_words(took_s),
        "model": str(model),
        **_use_of(model),
        "report": f"open-instruct report {shlex.quote(str(directory.path))}",
    }
    facts = {name: words for name, words in facts.items() if words}
    console = Console(speaks=True)
    if not console.is_live:
        for name, words in facts.items():
            console.say(f"{name}: {words}")
        return
    table = Table.grid(padding=(0, 2))
    for name, words in facts.items():
        table.add_row(name, words)
    console.rich.print(Panel(table, title="what happened", title_align="left", expand=False))


def _use_of(model: Path) -> dict[str, str]:
    config = model / "config.json"  # an adapter has none
    is_judge = config.exists() and "CausalLM" not in str(read_object(config).get("architectures"))
    folder = shlex.quote(str(model))
    return {"score": f"open-instruct score {folder} FILE"} if is_judge else {"chat": f"open-instruct chat {folder}"}


def learned_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where what people follow began and ended."""
    names = [entry.name for entry in followed() if entry.group == "Learning"]
    return _moves(rows, [name for name in names if not name.startswith("eval/")])


def held_out_words(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The same of the first figures of the evaluations."""
    return _moves(evaluations, in_order(evaluations[0].keys() - {"step"})[:NUM_HELD_OUT])


def _moves(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    there = [name for name in names if is_number(rows[0].get(name)) and is_number(rows[-1].get(name))]
    return ", ".join(
        f"{name.removeprefix('eval/')} {_said(rows[0][name])} -> {_said(rows[-1][name])}" for name in there
    )


def _said(value: float) -> str:
    """To four digits; what rounding left of a zero is one."""
    return f"{round(value, 6) + 0.0:.4g}"
