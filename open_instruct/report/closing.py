"""The last lines of a finished run: its results, the folder of its model, and the next commands."""

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

ADAPTER_KIND = ("adapter_config.json", "task_type")
NUM_HELD_OUT = 3  # the first ones in the table of metrics, which say most about the objective


def print_results(config: LearnerConfig, *, took_s: float) -> None:
    """Print the end of a run in a frame on a terminal, and in plain lines elsewhere; nothing without a model."""
    directory = RunDirectory(path=Path(config.run.output_dir))
    model = exported_by(config)
    rows = list(rows_of(directory.metrics))
    if not rows or not model.exists():
        return
    facts = {
        f"{counted(rows[-1]['step'], 'step')}": learned_words(rows),
        "held out": held_out_words(list(rows_of(directory.evaluations))),
        "time": time_words(took_s),
        "model": str(model),
        **_next_command(model),
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


def learned_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first and last values of the metrics in a step's line."""
    names = [entry.name for entry in followed() if entry.group == "Learning"]
    return _first_to_last(rows, [name for name in names if not name.startswith("eval/")])


def held_out_words(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The first and last values of the first metrics of the evaluations."""
    names = {name for row in evaluations[:1] for name in row} - {"step"}
    return _first_to_last(evaluations, in_order(names)[:NUM_HELD_OUT])


def _next_command(model: Path) -> dict[str, str]:
    """How to talk to a model, or to an adapter; a judge has no such command."""
    name, field = ("config.json", "architectures") if (model / "config.json").exists() else ADAPTER_KIND
    if not any(word in str(read_object(model / name).get(field)) for word in ("CausalLM", "CAUSAL_LM")):
        return {}
    return {"talk": f"open-instruct chat {shlex.quote(str(model.parent))}"}


def _first_to_last(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    known = [name for name in names if is_number(first.get(name)) and is_number(last.get(name))]
    return ", ".join(f"{name.removeprefix('eval/')} {_short(first[name])} -> {_short(last[name])}" for name in known)


def _short(value: float) -> str:
    """A number in four digits. Rounding noise around 0 is 0, and not -0."""
    return f"{round(value, 6) + 0.0:.4g}"
