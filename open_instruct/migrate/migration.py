"""`open-instruct migrate-args`: a launch of open-instruct in our flags, with all that differs."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.config.flags import Flag, list_flags, spell_value
from open_instruct.config.help import asks_for_help
from open_instruct.config.name_hints import describe_name_here
from open_instruct.config.suites.upstream_flags import (
    EVERY,
    Entry,
    decide_fate,
    upstream_behaviours,
    upstream_table,
)
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.core.text import open_templates
from open_instruct.migrate.from_suite import (
    OPEN_INSTRUCT,
    READERS,
    Request,
    migrate_launch,
    read_request,
)
from open_instruct.migrate.launch import (
    ALL_TRAINERS,
    Sheet,
    find_command,
    find_trainer,
    read_launch,
)
from open_instruct.migrate.our_flags import drop_idle, find_default, find_problems, read_values
from open_instruct.migrate.rules import apply_rules
from open_instruct.migrate.suites.shell_script import expand_script
from open_instruct.objectives.registry import load_objective

USAGE = f"""\
usage: open-instruct migrate-args --from {"|".join((*READERS, OPEN_INSTRUCT))} [TRAINER]
           [--yaml] [--json] [--num_gpus N] [--num_rows N] FILE or FLAGS
       open-instruct migrate-args {"|".join(ALL_TRAINERS)} [--json] -- ARGS...
       open-instruct migrate-args {"|".join(ALL_TRAINERS)} [--json] FILE.yaml

Translates a launch of another suite into our flags: what is called otherwise, what is left out and
why, what cannot be had, and all that differs. FILE is the YAML, the shell script or (of TRL) the
Python script of a launch; FLAGS may be the whole line, launcher and script included. A YAML file
gives a YAML file, with what is said of it in comments, and so does --yaml. --num_gpus and
--num_rows say how many GPUs learn and how many rows there are, where a batch or a length follows
from them. Without --from the launch is open-instruct's (of prm: TRL's or OpenRLHF's).
Nothing is started or executed. The exit code is 0 where all is translated, 2 where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A launch in our flags.

    Attributes:
        arguments: the words after `open-instruct COMMAND`; some set upstream's defaults.
        deepspeed: further words that make it a run on DeepSpeed, where the launch names a stage of
            DeepSpeed.
        renamed, dropped, refused: a sentence for each of upstream's flags. Where none is refused,
            the run is the same.
        defaults: for each of our flags that the launch leaves out, the default `upstream` and
            `here`, where they differ; also what differs without a flag.
    """

    arguments: list[str] = field(default_factory=list)
    deepspeed: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str]
    refused: Mapping[str, str]
    defaults: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def migrate_args(words: Sequence[str]) -> int:
    """Print the migration that `words` ask for; returns the exit code."""
    if _names_a_suite(words):
        request = read_request(words)
        if request.asks_for_help:
            print(USAGE)
            return 0
        if request.suite != OPEN_INSTRUCT and not _trains_on_steps(request):
            return migrate_launch(request)
        words = _write_open_instruct_words(request)
    ours, theirs = _split_at_dashes(words)
    if not ours:
        print(USAGE)
        return EXIT_INPUT
    if asks_for_help(ours):
        print(USAGE)
        return 0
    command, *rest = [word for word in ours if word != "--json"]
    if command not in ALL_TRAINERS:
        raise InputError(
            f"'{command}' has no launches upstream; use one of {', '.join(ALL_TRAINERS)}",
            kind="stray_word",
        )
    flags = [word for word in rest if word.startswith("--")]
    if flags:
        raise InputError(
            f"{flags[0]} stands before --: write migrate-args {command} [--json] -- ARGS...",
            kind="unreadable_file",
        )
    migration = migrate(command, read_launch(command, [*rest, *theirs]))
    if "--json" in ours:
        print(json.dumps(asdict(migration), indent=2))
    else:
        print(_describe_migration(command, migration))
    return EXIT_INPUT if migration.refused else 0


def _describe_migration(command: str, migration: Migration) -> str:
    pages = open_templates(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    without_a_flag = [name for name in migration.defaults if f"--{name}" not in migration.arguments]
    return pages.get_template("migration.txt.jinja").render(
        command=command,
        migration=migration,
        spelled=spell_value,
        shlex=shlex,
        without_a_flag=without_a_flag,
    )


def _split_at_dashes(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before and after `--`."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _names_a_suite(words: Sequence[str]) -> bool:
    """Whether `--from` is one of our words."""
    ours, _ = _split_at_dashes(words)
    return any(word.split("=", 1)[0] == "--from" for word in ours)


def _trains_on_steps(request: Request) -> bool:
    """Whether a launch trains a process reward model, which has tables of its own."""
    if request.suite not in ("trl", "openrlhf"):
        return False
    trainers = {find_trainer(word) for word in request.launch}
    return request.trainer == "prm" or bool(trainers & {"trl_prm", "train_prm"})


def _write_open_instruct_words(request: Request) -> list[str]:
    """The words of the form without `--from`, with a command that is named or the script's."""
    launch = expand_script(request.launch, lambda words: any(map(find_trainer, words)))
    trainers = list(filter(None, map(find_trainer, launch)))
    command = request.trainer
    if not command and trainers:
        command = find_command(trainers[0])
    if not command:
        raise InputError(
            f"the launch names no script: write migrate-args --from {request.suite} COMMAND ..., "
            f"with one of {', '.join(ALL_TRAINERS)}",
            kind="stray_word",
        )
    unused = [*(request.switches - {"--json"}), *(f"--{name}" for name in request.numbers)]
    if unused:
        raise InputError(
            f"{unused[0]} is not read for such a launch; leave it out", kind="foreign_flag"
        )
    json_switch = sorted(request.switches & {"--json"})
    return [command, *json_switch, "--", *launch]


def migrate(command: str, sheet: Sheet) -> Migration:
    """The flags of `open-instruct COMMAND` for a launch; `sheet` comes from `read_launch`."""
    objective = load_objective(command)
    flags = list_flags(objective.config_class)
    apply_rules(command, sheet)
    for name in list(sheet.theirs):
        _translate(command, name, flags, sheet)
    values = read_values(flags, sheet)
    drop_idle(flags, values, sheet)
    migration = Migration(dropped=sheet.dropped, refused=sheet.refused)
    for ours in sorted(values, key=lambda name: sheet.ours[name][1] not in sheet.launch_flags):
        _write_flag(ours, values[ours], find_default(flags[ours], sheet), sheet, migration)
    behaviours = upstream_behaviours(command) | upstream_behaviours(sheet.trainer)
    for what, (theirs, here) in behaviours.items():
        migration.defaults[what] = {"upstream": theirs, "here": here}
    if not sheet.refused:
        # What a run would refuse cannot be had.
        for line in find_problems(objective, migration.arguments):
            flag, _, rest = line.partition(" ")
            _, source = sheet.ours.get(flag.removeprefix("--"), ([], flag.strip("-:")))
            sheet.refused[source] = rest or line
    deepspeed = ["--backend", "deepspeed", *sheet.deepspeed]
    if sheet.deepspeed and not find_problems(objective, [*migration.arguments, *deepspeed]):
        migration.deepspeed.extend(deepspeed)
    return migration


def _write_flag(
    flag: str,
    value: Any,
    here: Any,
    sheet: Sheet,
    migration: Migration,
) -> None:
    """Add a flag of ours to the arguments, unless it has its default `here` without the launch."""
    words, source = sheet.ours[flag]
    if source in sheet.launch_flags:
        if source != flag:
            migration.renamed[source] = f"is --{' '.join([flag, *words])} here"
    elif value == here:
        return
    else:
        migration.defaults[flag] = {"upstream": value, "here": here}
    migration.arguments.extend([f"--{flag}", *words])


def _find_entry(
    command: str,
    name: str,
    flags: Mapping[str, Flag],
    sheet: Sheet,
) -> Entry | None:
    """What becomes of one of upstream's flags; None if it is known neither there nor here."""
    for table in (upstream_table(sheet.trainer), upstream_table(command), upstream_table(EVERY)):
        if name in table:
            return table[name]
    if name in flags:
        return Entry(ours=name)
    return None


def _translate(
    command: str,
    name: str,
    flags: Mapping[str, Flag],
    sheet: Sheet,
) -> None:
    entry = _find_entry(command, name, flags, sheet)
    if entry is None:
        hint = describe_name_here(name, flags, "--")
        sheet.refused[name] = hint or "is a flag neither of upstream's nor here"
        return
    becomes = decide_fate(entry, sheet.theirs[name])
    if becomes.ours is not None:
        sheet.set(becomes.ours, becomes.words, name)
    elif becomes.refused is not None:
        sheet.refused[name] = becomes.refused
    elif name in sheet.launch_flags:
        sheet.dropped[name] = becomes.unneeded or ""
