"""`open-instruct preview`: rows as the model will see them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from open_instruct.commands.checks.reading_rows import find_judges, hide_torch_from_transformers
from open_instruct.commands.run_flags import parse_named_run
from open_instruct.config.sections import flag
from open_instruct.core.files import write_user_file
from open_instruct.objectives.objective import Objective

# Flags that a run cannot do without and that say nothing of its rows.
ASSUMED = {"output_dir": "preview"}


@dataclass(kw_only=True)
class PreviewFlags:
    """Show rows as the model will see them: rendered, cut, with the tokens that are learned set
    apart, and how long they are. Takes the flags or the YAML file of the training command, whose
    first rows of --mixer_list (of GRPO: --dataset_mixer_list) are read. Ends with exit code 2 where
    that command would refuse its rows.

    Examples:
        open-instruct preview dpo --model_name_or_path MODEL_DIR --mixer_list pairs.jsonl 1.0 --out
            pairs.html
        open-instruct preview sft --model_name_or_path MODEL_DIR --mixer_list chats.csv 1.0
            --columns
            messages=dialogue
        open-instruct preview grpo configs/grpo/tiny_cpu.yaml --model_name_or_path DIR
            --dataset_mixer_list p.jsonl
            1.0
    """

    rows: int = flag("rows to show, from the whole of what is read", 3, minimum=1)
    read: int = flag("rows to read and measure, of each data set at most", 1000, minimum=2)
    out: str | None = flag(
        "write a page to this file (.html), with every token, in place of the terminal", None
    )


def main(argv: Sequence[str]) -> int:
    """Show rows of the run that the words after the command describe; returns the exit code.

    Raises:
        InputError: a flag, a file or the tokenizer will not do, the rows are what the run would
            refuse, or the page cannot be written.
    """
    config, objective, warnings = parse_request(argv)
    for warning in warnings:
        print(f"open-instruct preview: warning: {warning}", file=sys.stderr)

    judges = find_judges(config)  # users' own code, which may need torch
    hide_torch_from_transformers()
    from open_instruct.report.preview.sample import build_sample, html_page, print_sample

    sample = build_sample(
        config, objective, judges, num_read=config.preview.read, num_shown=config.preview.rows
    )
    if config.preview.out is None:
        print_sample(sample, Console(highlight=False, soft_wrap=True))
    else:
        write_user_file(
            config.preview.out, html_page(sample, title=f"Rows of {argv[0]}"), flag="--out"
        )
        print(f"the page is in {config.preview.out}")
    if sample.refusal is not None:
        raise sample.refusal
    return 0


def parse_request(words: Sequence[str]) -> tuple[Any, Objective, list[str]]:
    """The run's config with a `PreviewFlags`, its objective, and warnings.

    Raises:
        InputError: there is no such run, or a flag is wrong.
    """
    example = "open-instruct preview dpo --mixer_list"
    config, objective, unneeded = parse_named_run(
        words, assumed=ASSUMED, example=example, preview=PreviewFlags
    )
    return config, objective, [*objective.validate(config), *unneeded]
