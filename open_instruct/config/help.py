"""`--help` in the terminal."""

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from open_instruct.config.flags import Flag, flags_of, flags_of_section, sections_of, spelled
from open_instruct.wording import pages_in

MIN_WIDTH, MAX_WIDTH = 40, 110


def asks_for_help(words: Iterable[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(words)


def help_page(config_class: type, program: str, width: int, usage: str = "") -> Text:
    """The page of `--help`.

    `usage` is the usage line of a command that also takes the flags of a run.
    """
    description, examples = told_of(config_class)
    pages = pages_in(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= {"wrapped": partial(_wrapped, width), "escape": escape, "default_of": _default_of}
    page = pages.get_template("help.txt.jinja").render(
        program=program,
        usage=usage,
        required=[f"--{flag.name} {flag.metavar}" for flag in flags_of(config_class).values() if flag.required],
        description=description,
        sections=[
            (title_of(each) if name else "Flags", flags_of_section(each).values())
            for name, each in sections_of(config_class).items()
        ],
        examples=examples,
    )
    return Text.from_markup(page.rstrip(), emoji=False)


def told_of(config_class: type) -> tuple[str, list[str]]:
    """The description and the examples in a config class's docstring, where an example may go on in indented lines."""
    description, _, examples = (inspect.getdoc(config_class) or "").partition("\n\nExamples:\n")
    return description, [" ".join(each.split()) for each in re.split(r"\n(?=\S)", textwrap.dedent(examples)) if each]


def print_help(config_class: type, program: str, usage: str = "") -> None:
    """Print `--help` for the width of the terminal, styled where stdout is one and plain elsewhere."""
    page = help_page(config_class, program, min(shutil.get_terminal_size().columns, MAX_WIDTH), usage)
    if sys.stdout.isatty():
        Console(highlight=False, soft_wrap=True).print(page)
    else:  # rich would take a reader that has read enough for a failure
        print(page.plain)


def _wrapped(width: int, text: str, indent: int = 0, later_indent: int = 0) -> str:
    """`text` in lines of at most `width` characters; its own line breaks count as spaces."""
    filled = textwrap.fill(
        " ".join(text.split()),
        width=max(width, MIN_WIDTH),
        initial_indent=" " * indent,
        subsequent_indent=" " * later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return escape(filled)


def title_of(section_class: type) -> str:
    return (inspect.getdoc(section_class) or section_class.__name__).splitlines()[0]


def _default_of(flag: Flag) -> str:
    if flag.required:
        return "  [required]"
    return "" if flag.default is None and "default" in flag.help else f"  [default: {spelled(flag.default)}]"
