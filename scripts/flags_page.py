"""`docs/flags.md` on stdout: what `--help` says of every command that trains, as one page."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.check import CheckFlags
from open_instruct.commands.plan import PlanFlags
from open_instruct.commands.preview import PreviewFlags
from open_instruct.config.flags import Flag, list_flags, list_sections, section_title, spell_value
from open_instruct.config.help import docstring_parts
from open_instruct.objectives.registry import OBJECTIVES, load_objective

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

Each [section](#sections) stands here once. Its last column names the commands of a line that not all of its commands have.

## Commands
"""

OTHERS: dict[str, type] = {"plan": PlanFlags, "check": CheckFlags, "preview": PreviewFlags}
OTHERS_READ = {
    "plan": "The flags of the run that is planned",
    "check": "The flags of the run that is checked",
    "preview": "The flags of the run whose rows are shown",
}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of flags, as all commands have it.

    Attributes:
        by_command: the flags of the section that each command reads.
    """

    title: str
    by_command: Mapping[str, Sequence[Flag]]


def commands_with_flags() -> tuple[CommandFlags, ...]:
    """Every command that trains, in the order of their names."""
    scripts = {name: f"open_instruct/{name}.py" for name in OBJECTIVES} | {
        "grpo": "open_instruct/grpo_olmo_core_actor.py"
    }
    return tuple(
        CommandFlags(name=name, script=script, config_class=load_objective(name).config_class)
        for name, script in sorted(scripts.items())
    )


def markdown(commands: Sequence[CommandFlags]) -> str:
    """The page `docs/flags.md`: the sections that each command reads, then each section once."""
    sections = tuple(find_sections(commands))
    pairs = ", ".join(
        f"`open-instruct {command.name}` and `{command.script}`" for command in commands
    )
    parts = [MARKDOWN_HEAD.format(commands=pairs)]
    for command in commands:
        parts.append(f"### {command.name}\n\n{docstring_parts(command.config_class)[0]}\n")
        parts.append(f"Sections: {links_to(command.name, sections)}.\n")
    for name, sentence in OTHERS_READ.items():
        parts.append(f"### {name}\n\n{sentence}, and {links_to(name, sections)}.\n")
    parts.append("## Sections\n")
    parts += map(section_table, sections)
    parts.append(MARKDOWN_UPSTREAM)
    return "\n".join(parts)


def find_sections(commands: Sequence[CommandFlags]) -> Iterator[Section]:
    """Every section once, in the order in which commands name them.

    Sections of one title are one where they share flags. A title that commands give to quite
    different flags, such as `Loss`, stands for a section of each.
    """
    classes = {command.name: command.config_class for command in commands} | OTHERS
    by_title: dict[str, dict[str, list[Flag]]] = {}
    for command, config_class in classes.items():
        flags = list_flags(config_class).values()
        for name, section_class in list_sections(config_class).items():
            title = section_title(section_class, name) if name else "Flags"
            own = [flag for flag in flags if flag.section == name]
            by_title.setdefault(title, {})[command] = own
    for title, by_command in by_title.items():
        names = [{flag.name for flag in flags} for flags in by_command.values()]
        if set.intersection(*names):
            yield Section(title=title, by_command=by_command)
            continue
        for command, flags in by_command.items():
            yield Section(title=f"{title} of {command}", by_command={command: flags})


def links_to(command: str, sections: Sequence[Section]) -> str:
    titles = [section.title for section in sections if command in section.by_command]
    return ", ".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in titles)


def section_table(section: Section) -> str:
    """Its heading and its table; the last column names commands where they differ."""
    rows: dict[str, dict[str, list[str]]] = {}
    for command, flags in section.by_command.items():
        for flag in flags:
            rows.setdefault(flag.name, {}).setdefault(flag_row(flag), []).append(command)
    readers = {row: commands for of_flag in rows.values() for row, commands in of_flag.items()}
    everybody = list(section.by_command)
    differ = any(commands != everybody for commands in readers.values())
    lines = [f"### {section.title}", ""]
    lines.append("| flag | value | default | meaning |" + (" of |" if differ else ""))
    lines.append("|---|---|---|---|" + ("---|" if differ else ""))
    for row, commands in readers.items():
        of = "" if commands == everybody else ", ".join(commands)
        lines.append(row + (f" {of} |" if differ else ""))
    return "\n".join([*lines, ""])


def flag_row(flag: Flag) -> str:
    default = "" if flag.required else spell_value(flag.default)
    meaning = f"{'**Required.** ' if flag.required else ''}{_escaped(flag.meaning)}"
    return f"| `--{flag.name}` | {_cell(flag.metavar)} | {_cell(default)} | {meaning} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def _cell(text: str) -> str:
    # an escaped bar inside code is shown as a bare bar by GitHub's tables
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write(markdown(commands_with_flags()))
