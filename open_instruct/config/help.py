"""Print `--help` in the terminal: the flags that most runs set.

`--help all` prints every flag, and `--help WORD` the flags about a word.
"""

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from open_instruct.config.flags import (
    Flag,
    list_flags,
    list_section_flags,
    list_sections,
    section_title,
    spell_value,
)
from open_instruct.core.text import open_templates

MIN_WIDTH, MAX_WIDTH = 40, 110
ALL = "all"
CHECK = "--check"
# What most runs set. A command shows those that it has, with those that must be given and those of
# one's own objective.
MOST_USED = frozenset(
    {
        *("chat_template_name", "eval_mixer_list", "max_seq_length", "response_length"),
        *("loss_type", "beta", "loss_fn", "kd_loss", "reward_tokens", "verifier", "environment"),
        *(
            "learning_rate",
            "num_epochs",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
        ),
        *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "total_episodes"),
        *(
            "num_processes",
            "fsdp_shard_degree",
            "num_learners_per_node",
            "vllm_num_engines",
            "single_gpu_mode",
        ),
        *("activation_checkpointing", "use_lora", "report_to"),
    }
)


def asks_for_help(words: Iterable[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(words)


def asks_for_check(words: Sequence[str]) -> bool:
    """Whether a run is only to be looked at, as `open-instruct check` does it.

    `--help` comes first.
    """
    return CHECK in words and not asks_for_help(words)


def help_topic(words: Sequence[str]) -> str | None:
    """The word behind `--help`: `all`, or what flags are asked for; None where there is none.

    Example: `["dpo", "--help", "lora"]` asks for `lora`.
    """
    at = next(index for index, word in enumerate(words) if word in ("--help", "-h"))
    return " ".join(words[at + 1 :]).strip("- ").lower() or None


def help_page(
    config_class: type,
    program: str,
    width: int,
    usage: str = "",
    topic: str | None = None,
) -> Text:
    """The page of `--help`.

    Args:
        config_class: has the flags.
        program: the command as it was typed.
        width: characters of a line.
        usage: the usage line of a command that also takes the flags of a run.
        topic: the word behind `--help`.
    """
    description, examples = docstring_parts(config_class)
    sections = select_flags(config_class, topic)
    pages = open_templates(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= {
        "wrapped": partial(_wrap_text, width),
        "escape": escape,
        "default_of": _describe_default,
    }
    page = pages.get_template("help.txt.jinja").render(
        program=program,
        usage=usage,
        required=[
            f"--{flag.name} {flag.metavar}"
            for flag in list_flags(config_class).values()
            if flag.required
        ],
        topic=topic,
        trains=any(
            flag.required and flag.name == "output_dir"
            for flag in list_flags(config_class).values()
        ),
        num_flags=len(list_flags(config_class)),
        num_shown=sum(len(flags) for flags in sections.values()),
        description=description,
        sections=[
            (section_title(each, name) if name else "Flags", sections[name])
            for name, each in list_sections(config_class).items()
            if sections[name]
        ],
        examples=examples,
    )
    return Text.from_markup(page.rstrip(), emoji=False)


def select_flags(config_class: type, topic: str | None) -> dict[str, list[Flag]]:
    """The flags that a page of help shows, by their section."""

    def is_shown(flag: Flag, section_class: type) -> bool:
        if topic is None:
            is_own = not section_class.__module__.startswith("open_instruct.")
            return flag.required or flag.name in MOST_USED or is_own
        return topic == ALL or topic.replace("-", "_") in flag.name or topic in flag.meaning.lower()

    sections = list_sections(config_class)
    if topic is None and list(sections) == [""]:  # a command with few flags
        topic = ALL
    return {
        name: [
            flag
            for flag in list_section_flags(section_class).values()
            if is_shown(flag, section_class)
        ]
        for name, section_class in sections.items()
    }


def docstring_parts(config_class: type) -> tuple[str, list[str]]:
    """The description and the examples in a config class's docstring."""
    description, _, examples = (inspect.getdoc(config_class) or "").partition("\n\nExamples:\n")
    return description, [
        " ".join(each.split()) for each in re.split(r"\n(?=\S)", textwrap.dedent(examples)) if each
    ]


def print_help(
    config_class: type,
    program: str,
    words: Sequence[str],
    usage: str = "",
) -> None:
    """Print the help that `words` ask for: styled in a terminal, plain elsewhere."""
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    page = help_page(config_class, program, width, usage, help_topic(words))
    if sys.stdout.isatty():
        Console(highlight=False, soft_wrap=True).print(page)
    else:  # rich would take a reader that has read enough for a failure
        print(page.plain)


def _wrap_text(
    width: int,
    text: str,
    indent: int = 0,
    later_indent: int = 0,
) -> str:
    """`text` in lines of at most `width` characters; its own line breaks count as spaces."""
    wrapped_text = textwrap.fill(
        " ".join(text.split()),
        width=max(width, MIN_WIDTH),
        initial_indent=" " * indent,
        subsequent_indent=" " * later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return escape(wrapped_text)


def _describe_default(flag: Flag) -> str:
    if flag.required:
        return "  [required]"
    if flag.default is None and "default" in flag.help:
        return ""
    return f"  [default: {spell_value(flag.default)}]"
