"""The page of a run, or of several beside each other, as one HTML file.

It contains words and bars, and a script of ours that draws curves and shows rollouts.
"""

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

from open_instruct.core.metrics import metric_entry, sort_metrics
from open_instruct.planning.subject.units import GIB
from open_instruct.report.charts import build_histograms, build_series
from open_instruct.report.closing import describe_held_out, list_learning_metrics
from open_instruct.report.ends import count_steps_of_mean, describe_ends, mean_ends
from open_instruct.report.health import (
    diagnose,
    find_planned_bytes,
    mean_after_first,
    mean_seconds_by_part,
)
from open_instruct.report.run_files import (
    RunFiles,
    find_differing_flags,
    pack_rollouts,
    read_rollouts,
)
from open_instruct.report.templates import render_template
from open_instruct.run.console import describe_duration

# The parts of the page's script, in order.
SCRIPTS = ("marks.js", "curves.js", "rollouts.js", "live.js", "start.js")


def report_page(
    folders: Sequence[Path],
    *,
    max_rollouts: int,
    version: str = "",
    refresh_s: float = 0.0,
) -> str:
    """Render the page about the runs in `folders`.

    Nothing in it but our script can run: the page's policy names the digest of that script alone.

    Args:
        folders: the runs, beside each other.
        max_rollouts: completions of each run to show at most.
        version: of a page that is served, which reloads when the server has another version.
        refresh_s: how often a served page asks for the version.

    :raises InputError: a folder holds no run.
    """
    runs = [RunFiles.read(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    views = [_build_view(run, name, max_rollouts) for run, name in zip(runs, names, strict=True)]
    folder = Path(__file__).parent
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return render_template(
        "page.html.jinja",
        runs=views,
        differing=list(find_differing_flags(runs)),
        made=time.strftime("%Y-%m-%d %H:%M"),
        data=_build_script_data(views),
        script=Markup(script),
        digest=digest,
        version=version,
        refresh_s=refresh_s,
    )


def _build_script_data(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The values that the page's script reads; it finds the blocks by their ids."""
    names: set[str] = set()
    runs = []
    for view in views:
        names |= view["curves"]["columns"].keys() | view["held_out"]["columns"].keys()
        runs.append({key: view[key] for key in ("name", "objective", "curves", "held_out")})
    metrics = {name: asdict(metric_entry(name)) for name in sort_metrics(names)}
    return {"metrics": metrics, "runs": runs}


def _build_view(run: RunFiles, name: str, max_rollouts: int) -> dict[str, Any]:
    """The values of one run for the page's template."""
    table, notes = read_rollouts(run.folder, most=max_rollouts)
    parts = mean_seconds_by_part(run)
    # Rows of a GRPO run repeat its evaluations.
    steps = [{key: row[key] for key in row if not key.startswith("eval/")} for row in run.rows]
    return {
        "name": name,
        "files": run,
        "objective": _objective(run),
        "headline": _headline(run),
        "subject": _subject(run),
        "findings": diagnose(run),
        "curves": build_series(steps),
        "held_out": build_series(run.evaluations),
        "parts": parts,
        "step_s": fsum(parts.values()),
        "older_fraction": mean_after_first(run, "staleness/older_fraction"),
        "planned_bytes": find_planned_bytes(run),
        "measured_bytes": max(run.numbers("peak_memory_gib"), default=0.0) * GIB,
        "histograms": build_histograms(run, table),
        "notes": notes,
        "blocks": pack_rollouts(run, table),
    }


def _headline(run: RunFiles) -> dict[str, str]:
    """What came of a run: the facts on top of its page."""
    facts = {"first to last": _describe_means(run), "held out": describe_held_out(run.evaluations)}
    return {name: words for name, words in facts.items() if words}


def _subject(run: RunFiles) -> dict[str, str]:
    """What was trained, how, on what and how long."""
    mixture = run.config.get("mixer_list") or run.config.get("dataset_mixer_list")
    sources = mixture[::2] if isinstance(mixture, list) else []
    seconds = _sum_seconds(run)
    facts = {
        "model": str(run.config.get("model_name_or_path", "")),
        "objective": _objective(run),
        "data": ", ".join(map(str, sources)),
        "time of its steps": describe_duration(seconds) if seconds else "",
    }
    return {name: words for name, words in facts.items() if words}


def _describe_means(run: RunFiles) -> str:
    """The means that findings judge by, so that both have the same numbers."""
    words = describe_ends({name: mean_ends(run.rows, name) for name in list_learning_metrics()})
    size = count_steps_of_mean(run.rows)
    if not words or size == 1:
        return words
    return f"{words} (means of the first and of the last {size} steps)"


def _sum_seconds(run: RunFiles) -> float:
    """The seconds of all steps, from their times, or from their tokens and speeds."""
    durations = run.numbers("time/step")
    if durations:
        return fsum(durations)
    totals = run.numbers("num_tokens")
    speeds = run.numbers("tokens_per_second")
    steps = zip(pairwise([0.0, *totals]), speeds, strict=False)
    return fsum((after - before) / speed for (before, after), speed in steps if speed)


def _objective(run: RunFiles) -> str:
    """The command and its loss.

    Only runs with the same loss can be compared by numbers on its scale.
    """
    words = []
    for name in ("command", "loss_type", "loss_fn", "kd_loss"):
        value = run.config.get(name)
        if isinstance(value, list):
            value = " + ".join(map(str, value))
        if value:
            words.append(str(value))
    return " ".join(words)
