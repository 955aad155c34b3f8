"""The page of runs as one HTML file: words and bars stand in it, a script of ours draws curves and shows rollouts."""

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

from markupsafe import Markup

from open_instruct.metric_table import entry_of, in_order
from open_instruct.planning.shown.summary import LETTERS
from open_instruct.planning.subject.units import GIB
from open_instruct.report.charts import histograms_of, series_of
from open_instruct.report.closing import held_out_words, learned_words
from open_instruct.report.health import findings_of, parts_of_step, planned_gib
from open_instruct.report.run_files import RunFiles, differing_flags, packed_rollouts, read_rollouts
from open_instruct.report.templates import nodes_drawn, rendered
from open_instruct.run.console import time_words


def report_page(folders: Sequence[Path], *, max_rollouts: int, mark: str = "") -> str:
    """The text of the page about the runs in `folders`.

    Nothing in it but `page.js` can run: the page's policy names the digest of that script alone.

    :param mark: the version of a page that is served; its script asks the server whether that has changed.
    :raises InputError: a folder holds no run.
    """
    runs = [RunFiles.read(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    shown = [_shown(run, name, max_rollouts) for run, name in zip(runs, names, strict=True)]
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    columns = {name for run in shown for name in (*run["curves"]["columns"], *run["held_out"]["columns"])}
    # What the script reads; it finds the blocks by their ids.
    data = {
        "mark": mark,
        "metrics": {name: asdict(entry_of(name)) for name in in_order(columns)},
        "runs": [{key: run[key] for key in ("name", "objective", "curves", "held_out")} for run in shown],
    }
    return rendered(
        "page.html.jinja",
        runs=shown,
        differing=list(differing_flags(runs)),
        made=time.strftime("%Y-%m-%d %H:%M"),
        data=data,
        script=Markup(script),
        digest=digest,
    )


def _shown(run: RunFiles, name: str, max_rollouts: int) -> dict[str, Any]:
    """The values of one run for the page's template."""
    rollouts = read_rollouts(run.folder, most=max_rollouts)
    parts = parts_of_step(run)
    phases = _phases(run)
    steps = run.rows
    if run.evaluations:  # which the rows of a GRPO run repeat
        steps = [{key: row[key] for key in row if not key.startswith("eval/")} for row in run.rows]
    return {
        "name": name,
        "files": run,
        "objective": _objective(run),
        "headline": _headline(run),
        "findings": findings_of(run),
        "curves": series_of(steps),
        "held_out": series_of(run.evaluations),
        "parts": parts,
        "step_s": fsum(parts.values()),
        "phases": phases,
        "part_labels": [label for label in LETTERS if any(label in dict(phase["parts"]) for phase in phases)],
        "planned_bytes": planned_gib(run) * GIB,
        "measured_bytes": max(run.numbers("peak_memory_gib"), default=0.0) * GIB,
        "nodes": list(nodes_drawn(run.layout["gpus_per_node"], run.layout["shard_groups"])) if run.layout else [],
        "histograms": histograms_of(run, rollouts),
        "notes": rollouts.notes,
        "blocks": packed_rollouts(run, rollouts),
    }


def _headline(run: RunFiles) -> dict[str, str]:
    """The facts on top of a run: model, objective, data, length and results."""
    mixture = run.config.get("mixer_list") or run.config.get("dataset_mixer_list")
    sources = mixture[::2] if isinstance(mixture, list) else []
    seconds = _seconds(run)
    facts = {
        "model": str(run.config.get("model_name_or_path", "")),
        "objective": _objective(run),
        "data": ", ".join(map(str, sources)),
        "first to last": learned_words(run.rows),
        "held out": held_out_words(run.evaluations),
        "time of its steps": time_words(seconds) if seconds else "",
    }
    return {name: words for name, words in facts.items() if words}


def _seconds(run: RunFiles) -> float:
    """The time of all steps: the sum of their times or, if they have none, of their tokens over their speeds."""
    if durations := run.numbers("time/step"):
        return fsum(durations)
    totals, speeds = run.numbers("num_tokens"), run.numbers("tokens_per_second")
    steps = zip(pairwise([0.0, *totals]), speeds, strict=False)
    return fsum((after - before) / speed for (before, after), speed in steps if speed)


def _objective(run: RunFiles) -> str:
    """The command and its loss. Only runs with the same loss can be compared by numbers on its scale."""
    words = []
    for name in ("command", "loss_type", "loss_fn", "kd_loss"):
        value = run.config.get(name)
        if value:
            words.append(" + ".join(map(str, value)) if isinstance(value, list) else str(value))
    return " ".join(words)


def _phases(run: RunFiles) -> list[dict[str, Any]]:
    """The phases of the plan, with the parts of each in the order of their colours."""
    return [
        phase | {"parts": [(label, phase["parts"][label]) for label in LETTERS if phase["parts"].get(label)]}
        for phase in run.plan.get("phases", [])
    ]
