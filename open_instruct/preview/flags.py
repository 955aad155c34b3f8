"""What `open-instruct preview` is asked for, beside the flags of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.sections import flag

# Flags that a run cannot do without and that say nothing of its rows.
ASSUMED = {"output_dir": "preview"}


@dataclass(kw_only=True)
class PreviewSection:
    """What is shown"""

    rows: int = flag("rows to show, from the whole of what is read", 3, minimum=1)
    read: int = flag("rows to read and measure, of each data set at most", 1000, minimum=2)
    out: str | None = flag("write a page to this file (.html), with every token, in place of the terminal", None)


@dataclass(kw_only=True)
class PreviewFlags:
    """Show rows as the model will see them: rendered, cut, with the tokens that are learned set apart, and how long
    they are. Takes the flags or the YAML file of the training command, whose first rows of --mixer_list (of GRPO:
    --dataset_mixer_list) are read. Ends with exit code 2 where that command would refuse its rows.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct preview dpo --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0 --out pairs.html",
        "open-instruct preview sft --model_name_or_path MODEL_DIR --mixer_list chats.csv 1.0 --columns "
        "messages=dialogue",
        "open-instruct preview grpo configs/grpo/tiny_cpu.yaml --model_name_or_path DIR --dataset_mixer_list p.jsonl "
        "1.0",
    )

    preview: PreviewSection
