"""The model card, README.md, of an exported model, made from the files of a run alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from open_instruct.data.files.opening import looks_like_a_file


def model_card(settings: str, evaluations: Sequence[Mapping[str, Any]], *, trained_by: str, is_adapter: bool) -> str:
    """The text of the card.

    Args:
        settings: the text of the run's config.yaml, whose comments have the versions.
        evaluations: the rows of its eval.jsonl up to this model.
        trained_by: the command, or the name of an objective of one's own.
        is_adapter: whether the model is an adapter alone.
    """
    flags = yaml.safe_load(settings)
    mixture = flags.get("mixer_list") or flags.get("dataset_mixer_list") or []
    base = flags["model_name_or_path"]
    data = list(zip(mixture[::2], mixture[1::2], strict=True))
    head = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if trained_by == "reward_model" else "text-generation",
        "tags": ["open-instruct", trained_by],
        "base_model": base if _is_on_hub(base) else None,
        "datasets": sorted({name for name, _ in data if _is_on_hub(name)}),
    }
    given = {name: value for name, value in head.items() if value}
    parts = [
        f"---\n{yaml.safe_dump(given, sort_keys=False)}---\n",
        f"# {Path(flags['output_dir']).name or 'Model'}\n",
        f"{'An adapter of' if is_adapter else 'Trained from'} `{base}` with open-instruct: {trained_by}.\n",
        "## Data\n",
        _table(("rows", "amount"), [(f"`{name}`", amount) for name, amount in data]),
    ]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        names = [name for name in last if name.startswith("eval/") and isinstance(last[name], int | float)]
        steps = [f"step {row['step']}" for row in (first, last)]
        scores = [(name, _number(first.get(name)), _number(last[name])) for name in names]
        parts += ["## Scores\n", "Of held-out rows.\n", _table(("", *steps), scores)]
    parts += [
        "## Settings\n",
        "Every flag, with the versions it ran under; `open-instruct` takes them as a file.\n",
        f"```yaml\n{settings.rstrip()}\n```\n",
    ]
    return "\n".join(parts)


def _is_on_hub(name: str) -> bool:
    return "/" in name and not looks_like_a_file(name) and not Path(name).exists()


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
