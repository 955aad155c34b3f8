"""`--help` in the terminal."""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

from open_instruct.config.flags import Flag, flags_of, sections_of, spelled

Span = tuple[str, str]  # text and its rich style
Line = tuple[Span, ...]

BLANK: Line = ()
MIN_WIDTH, MAX_WIDTH = 40, 110

SPELLING = """
Booleans: --flag, --flag false or --no_flag. Lists take every word up to the next flag. Flags on the
command line replace those of FILE.yaml, a flat mapping of flag names.
"""


def asks_for_help(words: Iterable[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(words)


def help_lines(config_class: type, program: str, width: int, usage: str = "") -> Iterator[Line]:
    """The lines of `--help`. The description is the config class's docstring, the examples its `examples`.

    `usage` is the usage line of a command that also takes the flags of a run.
    """
    flags = flags_of(config_class).values()
    required = " ".join(f"--{flag.name} {flag.metavar}" for flag in flags if flag.required)
    words = usage or f"[FILE.yaml] {required}"
    yield from wrapped(f"usage: {program} {words} [--flag value ...]", width, later_indent=7)
    yield BLANK
    yield from wrapped(inspect.getdoc(config_class) or "", width)
    if not usage:
        yield BLANK
        yield from wrapped(SPELLING, width)
    for section, section_class in sections_of(config_class).items():
        yield BLANK
        yield ((title_of(section_class), "bold"),)
        for flag in (each for each in flags if each.section == section):
            yield (("  ", ""), (f"--{flag.name}", "bold cyan"), (f" {flag.metavar}", "cyan"), (_default(flag), "dim"))
            yield from wrapped(flag.meaning, width, indent=6, later_indent=6)
    if examples := getattr(config_class, "examples", ()):
        yield BLANK
        yield (("Examples", "bold"),)
        yield from (((f"  {example}", "green"),) for example in examples)


def print_help(config_class: type, program: str, usage: str = "") -> None:
    """Print `--help` for the width of the terminal, styled where stdout is one and plain elsewhere."""
    lines = help_lines(config_class, program, min(shutil.get_terminal_size().columns, MAX_WIDTH), usage)
    if sys.stdout.isatty():
        from rich.console import Console  # not needed, so not loaded, where the output is plain
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text.assemble(*line))
    else:
        print("\n".join("".join(text for text, _ in line) for line in lines))


def wrapped(text: str, width: int, indent: int = 0, later_indent: int = 0) -> Iterator[Line]:
    """`text` in lines of at most `width` characters; its own line breaks count as spaces."""
    for line in textwrap.wrap(
        " ".join(text.split()),
        width=max(width, MIN_WIDTH),
        initial_indent=" " * indent,
        subsequent_indent=" " * later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield ((line, ""),)


def title_of(section_class: type) -> str:
    return (inspect.getdoc(section_class) or section_class.__name__).splitlines()[0]


def _default(flag: Flag) -> str:
    if flag.required:
        return "  [required]"
    return "" if flag.default is None and "default" in flag.help else f"  [default: {spelled(flag.default)}]"
