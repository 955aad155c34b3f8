"""Writes the model card, README.md, of an exported model, from the files of a run alone."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from open_instruct.core.text import open_templates
from open_instruct.data.files.opening import looks_like_a_file
from open_instruct.run.run_directory import RunDirectory, read_rows

PIPELINES = {"reward_model": "text-classification", "prm": "token-classification"}


def write_card(
    directory: RunDirectory,
    *,
    trained_by: str,
    is_adapter: bool = False,
    until: int | None = None,
) -> str | None:
    """The card of the model that the run exports; None if the run's settings cannot be read.

    Args:
        directory: the run's.
        trained_by: the command, or the name of an objective of one's own.
        is_adapter: whether the model is an adapter alone.
        until: the step of the exported weights; the last one by default.
    """
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError, yaml.YAMLError):
        settings = directory.config.read_text(encoding="utf-8")  # whose comments have the versions
        flags = yaml.safe_load(settings)
        mixture = flags.get("mixer_list") or flags.get("dataset_mixer_list") or []
        best = directory.read_best_step()
        if best is not None and best.step != until:
            best = None
        evaluations = list(read_rows(directory.evaluations))
        if until is not None:
            evaluations = [row for row in evaluations if row["step"] <= until]
        is_drawn = bool(flags.get("from_scratch"))
        base = flags.get("config_name") or flags["model_name_or_path"]
        data = list(zip(mixture[::2], mixture[1::2], strict=True))
        head = {
            "library_name": "peft" if is_adapter else "transformers",
            "pipeline_tag": find_pipeline(trained_by, flags),
            "tags": ["open-instruct", trained_by],
            "base_model": base if _is_on_hub(base) and not is_drawn else None,
            "datasets": sorted({name for name, _ in data if _is_on_hub(name)}),
        }
        head = {name: value for name, value in head.items() if value}
        pages = open_templates(Path(__file__).parent, trim_blocks=True, keep_trailing_newline=True)
        return pages.get_template("card.md.jinja").render(
            head=yaml.safe_dump(head, sort_keys=False),
            best=best,
            title=Path(flags["output_dir"]).name or "Model",
            base=base,
            is_drawn=is_drawn,
            trained_by=trained_by,
            is_adapter=is_adapter,
            data=data,
            evaluations=evaluations,
            settings=settings,
        )
    return None


def find_pipeline(trained_by: str, flags: Mapping[str, Any]) -> str:
    """The hub's word for what the model does."""
    if flags.get("reward_tokens"):
        return "text-generation"
    return PIPELINES.get(trained_by, "text-generation")


def _is_on_hub(name: str) -> bool:
    return "/" in name and not looks_like_a_file(name) and not Path(name).exists()
