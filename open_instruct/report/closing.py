"""The last lines of a finished run: its results, the folder of its model, and the next commands."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.panel import Panel
from rich.table import Table

from open_instruct.config.lora import LoRASection
from open_instruct.config.run_sections import RunSection
from open_instruct.core.metrics import list_console_metrics, sort_metrics
from open_instruct.core.text import spell_count
from open_instruct.data.files.foreign_json import read_object
from open_instruct.report.ends import Rows, describe_ends, step_ends
from open_instruct.run.console import Console, describe_duration
from open_instruct.run.run_directory import RunDirectory, find_export_folder, read_rows

FRAME_COLUMNS = 6  # of the frame and of the space between its two columns
NUM_HELD_OUT = 3  # the first ones in the table of metrics, which say most about the objective


def print_results(run: RunSection, adapters: LoRASection | None, *, took_s: float) -> None:
    """Print the end of a run, in a frame on a terminal; nothing where it left no model."""
    directory = RunDirectory(path=Path(run.output_dir))
    model = find_export_folder(run, adapters)
    rows = list(read_rows(directory.metrics))
    if not rows or not model.exists():
        return
    facts = {
        spell_count(rows[-1]["step"], "step"): describe_learning(rows),
        "held out": describe_held_out(list(read_rows(directory.evaluations))),
        "exported": describe_best_step(run),
        "time": describe_duration(took_s),
        "model": str(model),
        **_next_command(model),
        "report": f"open-instruct report {shlex.quote(str(directory.path))}",
    }
    facts = {name: words for name, words in facts.items() if words}
    console = Console(speaks=True)
    if not console.is_live or not _fits_in_frame(facts, console.rich.width):
        for name, words in facts.items():
            console.say(f"{name}: {words}")
        return
    table = Table.grid(padding=(0, 2))
    for name, words in facts.items():
        table.add_row(name, words)
    console.rich.print(Panel(table, title="what happened", title_align="left", expand=False))


def _fits_in_frame(facts: Mapping[str, str], width: int) -> bool:
    """Whether each word, such as a path, stays whole in its line of the frame."""
    longest_word = max(map(len, " ".join(facts.values()).split()))
    return max(map(len, facts)) + longest_word + FRAME_COLUMNS <= width


def describe_learning(rows: Rows) -> str:
    """The first and the last values of the metrics in a step's line."""
    return describe_ends({name: step_ends(rows, name) for name in list_learning_metrics()})


def describe_held_out(evaluations: Rows) -> str:
    """The first and the last values of the first metrics of the evaluations."""
    names: set[str] = set().union(*evaluations)
    known_names = []
    for name in sort_metrics(names - {"step", "samples"}):
        pair = step_ends(evaluations, name)
        if pair and not name.startswith("eval/num_"):
            known_names.append((name, pair))
    return describe_ends(dict(known_names[:NUM_HELD_OUT]))


def describe_best_step(run: RunSection) -> str:
    """The step of the exported weights, where `--keep_best` has chosen it; empty otherwise."""
    if not run.keep_best:
        return ""
    best = RunDirectory(path=Path(run.output_dir)).read_best_step()
    if best is None:
        return ""
    return str(best)


def list_learning_metrics() -> list[str]:
    """The names of the metrics in a step's line that say what was learned."""
    names = [entry.name for entry in list_console_metrics() if entry.group == "Learning"]
    return [name for name in names if not name.startswith("eval/")]


def _next_command(model: Path) -> dict[str, str]:
    """How to talk to a model, or to an adapter; a judge has no such command."""
    if (model / "config.json").exists():
        kind = str(read_object(model / "config.json").get("architectures"))
    else:
        kind = str(read_object(model / "adapter_config.json").get("task_type"))
    if "CausalLM" not in kind and "CAUSAL_LM" not in kind:
        return {}
    return {"talk": f"open-instruct chat {shlex.quote(str(model.parent))}"}
