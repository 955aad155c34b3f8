"""`--help` in the terminal, and the same flags as `docs/flags.md`.

`python -m open_instruct.config.help` writes the Markdown page to stdout.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from open_instruct.config.flags import Flag, flags_of, sections_of, spelled

Span = tuple[str, str]  # text and its rich style
Line = tuple[Span, ...]

BLANK: Line = ()
MIN_WIDTH, MAX_WIDTH = 40, 110

SPELLING = """
Booleans: --flag, --flag false or --no_flag. Lists take every word up to the next flag. Flags on the
command line replace those of FILE.yaml, a flat mapping of flag names.
"""

MARKDOWN_HEAD = """\
# Flags

Written by `python -m open_instruct.config.help > docs/flags.md`; a test holds it up to date.

A command and its script take the same flags: {commands}.

- The first word may be a YAML file, a flat mapping of flag names: `run.yaml --beta 5`. Flags replace its values.
- `--flag value` and `--flag=value` are the same, and so are `--max-seq-length` and `--max_seq_length`.
- Booleans: `--packing`, `--packing true`, `--packing false`, `--no_packing`.
- A list takes every word up to the next flag: `--mixer_list a.jsonl 1.0 b.parquet 500`.
- `none` unsets a flag whose default is none: `--max_train_steps none`.
- Unknown, repeated and mistyped flags are errors (exit code 2), all of them listed at once, before anything is loaded.
"""

MARKDOWN_UPSTREAM = """\
## Flags of open-instruct that mean nothing here

A command written for open-instruct's `dpo_tune_cache.py` or `finetune.py` may carry these. Each is refused with its
sentence, or, where that names a flag which the command lacks, as unknown.

| flag | |
|---|---|
"""


def help_lines(config_class: type, program: str, width: int) -> Iterator[Line]:
    """The lines of `--help`. The description is the config class's docstring, the examples its `examples`."""
    flags = flags_of(config_class)
    required = " ".join(f"--{flag.name} {flag.metavar}" for flag in flags.values() if flag.required)
    yield from wrapped(f"usage: {program} [FILE.yaml] {required} [--flag value ...]", width, later_indent=7)
    yield BLANK
    yield from wrapped(inspect.getdoc(config_class) or "", width)
    yield BLANK
    yield from wrapped(SPELLING, width)
    for section, section_class in sections_of(config_class).items():
        of_section = [flag for flag in flags.values() if flag.section == section]
        yield from flag_lines(_title(section_class), of_section, width)
    examples: Sequence[str] = getattr(config_class, "examples", ())
    if examples:
        yield BLANK
        yield (("Examples", "bold"),)
        for example in examples:
            yield ((f"  {example}", "green"),)


def flag_lines(title: str, flags: Iterable[Flag], width: int, *, with_defaults: bool = True) -> Iterator[Line]:
    """A group of flags under its title, after an empty line."""
    yield BLANK
    yield ((title, "bold"),)
    for flag in flags:
        default = _default(flag) if with_defaults else ""
        yield (("  ", ""), (f"--{flag.name}", "bold cyan"), (f" {flag.metavar}", "cyan"), (default, "dim"))
        yield from wrapped(flag.help, width, indent=6, later_indent=6)


def print_help(config_class: type, program: str) -> None:
    """Print the `--help` of an entry."""
    print_lines(lambda width: help_lines(config_class, program, width))


def print_lines(lines_of_width: Callable[[int], Iterator[Line]]) -> None:
    """Print lines for the width of the terminal, styled where stdout is one and plain elsewhere."""
    lines = lines_of_width(min(shutil.get_terminal_size().columns, MAX_WIDTH))
    if sys.stdout.isatty():
        from rich.console import Console  # not needed, so not loaded, where the output is plain
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text.assemble(*line))
    else:
        print("\n".join("".join(text for text, _ in line) for line in lines))


def wrapped(text: str, width: int, indent: int = 0, later_indent: int = 0) -> Iterator[Line]:
    """`text` in lines of at most `width` characters, its own line ends forgotten."""
    for line in textwrap.wrap(
        " ".join(text.split()),
        width=max(width, MIN_WIDTH),
        initial_indent=" " * indent,
        subsequent_indent=" " * later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield ((line, ""),)


def _title(section_class: type) -> str:
    return (inspect.getdoc(section_class) or section_class.__name__).splitlines()[0]


def _default(flag: Flag) -> str:
    if flag.required:
        return "  [required]"
    if flag.default is None and "default" in flag.help:
        return ""
    return f"  [default: {spelled(flag.default)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFlags:
    """A command of the page of flags: its name, the script that does the same, and what it reads."""

    name: str
    script: str
    config_class: type


def commands_with_flags() -> tuple[CommandFlags, ...]:
    """Every command that trains, in the order of the page."""
    from open_instruct.config.dpo import DPOConfig
    from open_instruct.config.grpo import GRPOConfig
    from open_instruct.config.sft import SFTConfig

    return (
        CommandFlags(name="dpo", script="open_instruct/dpo.py", config_class=DPOConfig),
        CommandFlags(name="grpo", script="open_instruct/grpo_olmo_core_actor.py", config_class=GRPOConfig),
        CommandFlags(name="sft", script="open_instruct/sft.py", config_class=SFTConfig),
    )


def markdown(commands: Sequence[CommandFlags]) -> str:
    """The page `docs/flags.md`: for every command a table a section, and upstream's flags that are refused."""
    from open_instruct.config.plan import DPOPlanConfig, PlanSection
    from open_instruct.config.upstream_flags import UPSTREAM_FLAGS

    pairs = ", ".join(f"`open-instruct {command.name}` and `{command.script}`" for command in commands)
    parts = [MARKDOWN_HEAD.format(commands=pairs)]
    for command in commands:
        parts.append(f"## {command.name}\n\n{inspect.getdoc(command.config_class)}\n")
        parts += _section_tables(command.config_class)
    parts.append("## plan\n\nThe flags of the run that is planned, and these:\n")
    parts += _section_tables(DPOPlanConfig, only=PlanSection)
    rows = "\n".join(f"| `--{name}` | {_escaped(sentence)} |" for name, sentence in sorted(UPSTREAM_FLAGS.items()))
    parts.append(MARKDOWN_UPSTREAM + rows + "\n")
    return "\n".join(parts)


def _section_tables(config_class: type, *, only: type | None = None) -> Iterator[str]:
    for section, section_class in sections_of(config_class).items():
        if only not in (None, section_class):
            continue
        rows = "\n".join(
            f"| `--{flag.name}` | {_cell(flag.metavar)} | {_cell('' if flag.required else spelled(flag.default))} "
            f"| {'**Required.** ' if flag.required else ''}{_escaped(flag.help)} |"
            for flag in flags_of(config_class).values()
            if flag.section == section
        )
        yield f"### {_title(section_class)}\n\n| flag | value | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def _cell(text: str) -> str:
    # an escaped bar inside code is shown as a bare bar by GitHub's tables
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write(markdown(commands_with_flags()))
