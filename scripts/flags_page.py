"""`docs/flags.md` on stdout: what `--help` says of every command that trains, as one page."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.check import CheckFlags
from open_instruct.commands.preview import PreviewFlags
from open_instruct.config.flags import flags_of, sections_of, spelled
from open_instruct.config.help import title_of, told_of
from open_instruct.objectives.registry import OBJECTIVES, objective_named
from open_instruct.planning.request import PlanFlags

MARKDOWN_HEAD = """\
# Flags

Written by `python scripts/flags_page.py > docs/flags.md`; a test holds it up to date.

A command and its script take the same flags: {commands}.

- The first word may be a YAML file, a flat mapping of flag names: `run.yaml --beta 5`. Flags replace its values.
- `--flag value` and `--flag=value` are the same, and so are `--max-seq-length` and `--max_seq_length`.
- Booleans: `--packing`, `--packing true`, `--packing false`, `--no_packing`.
- A list takes every word up to the next flag: `--mixer_list a.jsonl 1.0 b.parquet 500`.
- `none` unsets a flag whose default is none: `--max_train_steps none`.
- Unknown, repeated and mistyped flags are errors (exit code 2), all of them listed at once, before anything is loaded.
"""

MARKDOWN_UPSTREAM = """\
## Flags of open-instruct

What becomes of those is in [upstream.md](upstream.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFlags:
    """A command of the page of flags: its name, the script that does the same, and what it
    reads.
    """

    name: str
    script: str
    config_class: type


def commands_with_flags() -> tuple[CommandFlags, ...]:
    """Every command that trains, in the order of their names."""
    scripts = {name: f"open_instruct/{name}.py" for name in OBJECTIVES} | {
        "grpo": "open_instruct/grpo_olmo_core_actor.py"
    }
    return tuple(
        CommandFlags(name=name, script=script, config_class=objective_named(name).config_class)
        for name, script in sorted(scripts.items())
    )


def markdown(commands: Sequence[CommandFlags]) -> str:
    """The page `docs/flags.md`: for every command a table a section."""
    pairs = ", ".join(
        f"`open-instruct {command.name}` and `{command.script}`" for command in commands
    )
    parts = [MARKDOWN_HEAD.format(commands=pairs)]
    for command in commands:
        parts.append(f"## {command.name}\n\n{told_of(command.config_class)[0]}\n")
        parts += _section_tables(command.config_class)
    parts.append("## plan\n\nThe flags of the run that is planned, and these:\n")
    parts += _section_tables(PlanFlags)
    parts.append("## check\n\nThe flags of the run that is checked, and these:\n")
    parts += _section_tables(CheckFlags)
    parts.append("## preview\n\nThe flags of the run whose rows are shown, and these:\n")
    parts += _section_tables(PreviewFlags)
    parts.append(MARKDOWN_UPSTREAM)
    return "\n".join(parts)


def _section_tables(config_class: type) -> Iterator[str]:
    for section, section_class in sections_of(config_class).items():
        rows = "\n".join(
            f"| `--{flag.name}` | {_cell(flag.metavar)} | "
            f"{_cell('' if flag.required else spelled(flag.default))} | "
            f"{'**Required.** ' if flag.required else ''}{_escaped(flag.meaning)} |"
            for flag in flags_of(config_class).values()
            if flag.section == section
        )
        title = title_of(section_class) if section else "Flags"
        yield f"### {title}\n\n| flag | value | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def _cell(text: str) -> str:
    # an escaped bar inside code is shown as a bare bar by GitHub's tables
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write(markdown(commands_with_flags()))
