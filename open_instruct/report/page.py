"""The page of runs as one HTML file: words and bars stand in it, a script of ours draws curves and shows rollouts."""

from __future__ import annotations

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
from open_instruct.report.closing import held_out_words, learned_words
from open_instruct.report.health import findings_of, parts_of_step, planned_gib
from open_instruct.report.histograms import histograms_of
from open_instruct.report.rollouts import packed_rollouts, read_rollouts
from open_instruct.report.run_files import RunFiles, differing_flags
from open_instruct.report.series import series_of
from open_instruct.report.templates import nodes_drawn, rendered
from open_instruct.run.console import time_words


def report_page(folders: Sequence[Path], *, max_rollouts: int, mark: str = "") -> str:
    """The whole file, of the runs in `folders`.

    Nothing in it but `page.js` can run: the page's policy names the digest of that script alone.

    :param mark: of a page that is served: what it asks its server about, to know when it is out of date.
    :raises InputError: a folder holds no run.
    """
    runs = [RunFiles.read(folder) for folder in folders]
    shown = [_shown(run, name, max_rollouts) for run, name in zip(runs, _names(runs), strict=True)]
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # What the script reads; it finds the blocks by their ids.
    kept = ("name", "objective", "curves", "held_out")
    names = in_order({name for run in shown for kind in ("curves", "held_out") for name in run[kind]["columns"]})
    metrics = {name: asdict(entry_of(name)) for name in names}
    return rendered(
        "page.html.jinja",
        runs=shown,
        differing=list(differing_flags(runs)),
        made=time.strftime("%Y-%m-%d %H:%M"),
        data={"mark": mark, "metrics": metrics, "runs": [{key: run[key] for key in kept} for run in shown]},
        script=Markup(script),
        digest=digest,
    )


def _shown(run: RunFiles, name: str, max_rollouts: int) -> dict[str, Any]:
    """What the page has of a run."""
    rollouts = read_rollouts(run.folder, most=max_rollouts)
    last = run.rows[-1]["step"] if run.rows else 0
    of = f" of {run.num_steps}" if run.num_steps else ""
    parts = parts_of_step(run)
    phases = _phases(run)
    # The rows of a GRPO run repeat what its evaluations say.
    steps = [{key: row[key] for key in row if not (run.evaluations and key.startswith("eval/"))} for row in run.rows]
    return {
        "name": name,
        "folder": str(run.folder),
        "objective": _objective(run),
        "headline": _headline(run),
        "state": f"step {last:g}{of}" + (", ended" if run.has_ended else ""),
        "findings": findings_of(run),
        "curves": series_of(steps),
        "held_out": series_of(run.evaluations),
        "parts": parts,
        "step_s": fsum(parts.values()),
        "plan": run.plan,
        "phases": phases,
        "part_labels": [label for label in LETTERS if any(label in dict(phase["parts"]) for phase in phases)],
        "planned_bytes": planned_gib(run) * GIB,
        "measured_bytes": max(run.numbers("peak_memory_gib"), default=0.0) * GIB,
        "layout": run.layout,
        "nodes": _nodes(run),
        "histograms": histograms_of(run, rollouts),
        "notes": rollouts.notes,
        "blocks": packed_rollouts(run, rollouts),
        "config": run.config,
        "made_with": run.made_with,
    }


def _headline(run: RunFiles) -> dict[str, str]:
    """What was trained, how, on what, and what came of it."""
    data = [run.config.get(name) for name in ("mixer_list", "dataset_mixer_list")]
    facts = {
        "model": str(run.config.get("model_name_or_path", "")),
        "objective": _objective(run),
        "data": ", ".join(str(name) for words in data if isinstance(words, list) for name in words[::2]),
        "first to last": learned_words(run.rows) if run.rows else "",
        "held out": held_out_words(run.evaluations) if run.evaluations else "",
        "time of its steps": time_words(seconds) if (seconds := _seconds(run)) else "",
    }
    return {name: words for name, words in facts.items() if words}


def _seconds(run: RunFiles) -> float:
    """Of all steps; where they do not say it, their tokens over their speed do."""
    if durations := run.numbers("time/step"):
        return fsum(durations)
    totals, speeds = run.numbers("num_tokens"), run.numbers("tokens_per_second")
    steps = zip(pairwise([0.0, *totals]), speeds, strict=False)
    return fsum((after - before) / speed for (before, after), speed in steps if speed)


def _objective(run: RunFiles) -> str:
    """The command and its loss. Numbers on the scale of a loss are compared between runs that share it."""
    words = [run.config.get(name) for name in ("command", "loss_type", "loss_fn", "kd_loss")]
    return " ".join(" + ".join(map(str, word)) if isinstance(word, list) else str(word) for word in words if word)


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Of their folders; as they were given where two are called the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _phases(run: RunFiles) -> list[dict[str, Any]]:
    """The phases of its plan, the parts of each in the order of their colours."""
    return [
        phase | {"parts": [(label, phase["parts"][label]) for label in LETTERS if phase["parts"].get(label)]}
        for phase in run.plan.get("phases", [])
    ]


def _nodes(run: RunFiles) -> list[dict[str, Any]]:
    """The drawn nodes of its layout; none where the file has no layout that can be drawn."""
    try:
        return list(nodes_drawn(run.layout["gpus_per_node"], run.layout["shard_groups"]))
    except (KeyError, TypeError, IndexError):
        return []
