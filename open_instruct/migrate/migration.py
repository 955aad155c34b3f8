"""`open-instruct migrate-args`: a launch of open-instruct in our flags, with all that differs."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.config.flags import Flag, flags_of, spelled
from open_instruct.config.help import asks_for_help
from open_instruct.config.name_hints import describe_name_here
from open_instruct.config.suites.upstream_flags import (
    EVERY,
    Entry,
    fate,
    upstream_behaviours,
    upstream_table,
)
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.core.text import pages_in
from open_instruct.migrate.from_suite import (
    OPEN_INSTRUCT,
    READERS,
    Request,
    migrate_from,
    read_request,
)
from open_instruct.migrate.launch import ALL_TRAINERS, Sheet, read_launch, script_of
from open_instruct.migrate.our_flags import default_here, drop_idle, find_problems, read_values
from open_instruct.migrate.rules import settle
from open_instruct.objectives.registry import objective_named

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
        arguments: the words behind `open-instruct COMMAND`; also what brings upstream's defaults.
        deepspeed: the words after these that make it a run on DeepSpeed, where the launch names a
            stage of that.
        renamed, dropped, refused: a sentence for each of upstream's flags. Where none is refused,
            the run is the same.
        defaults: of our flags that the launch leaves out, the default `upstream` and `here`, where
            they differ; and what differs by no flag.
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
        if request.suite != OPEN_INSTRUCT and not _is_of_steps(request):
            return migrate_from(request)
        words = _words_for_open_instruct(request)
    end = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:end], words[end + 1 :]
    if not ours or asks_for_help(ours):
        print(USAGE)
        return 0 if ours else EXIT_INPUT
    as_json = "--json" in ours
    command, *rest = [word for word in ours if word != "--json"]
    if command not in ALL_TRAINERS:
        raise InputError(
            f"'{command}' has no launches upstream; use one of {', '.join(ALL_TRAINERS)}",
            kind="stray_word",
        )
    if flags := [word for word in rest if word.startswith("--")]:
        raise InputError(
            f"{flags[0]} stands before --: write migrate-args {command} [--json] -- ARGS...",
            kind="unreadable_file",
        )
    migration = migrate(command, read_launch(command, [*rest, *theirs]))
    if as_json:
        print(json.dumps(asdict(migration), indent=2))
    else:
        pages = pages_in(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
        without_a_flag = [
            name for name in migration.defaults if f"--{name}" not in migration.arguments
        ]
        names = {"command": command, "migration": migration, "spelled": spelled, "shlex": shlex}
        names["without_a_flag"] = without_a_flag
        print(pages.get_template("migration.txt.jinja").render(names))
    return EXIT_INPUT if migration.refused else 0


def _names_a_suite(words: Sequence[str]) -> bool:
    """Whether `--from` stands among the words that are ours."""
    end = words.index("--") if "--" in words else len(words)
    return any(word.split("=", 1)[0] == "--from" for word in words[:end])


def _is_of_steps(request: Request) -> bool:
    """Whether a launch trains a process reward model, which has tables of its own."""
    scripts = {script_of(word) for word in request.launch}
    return request.suite in ("trl", "openrlhf") and (
        request.trainer == "prm" or bool(scripts & {"trl_prm", "train_prm"})
    )


def _words_for_open_instruct(request: Request) -> list[str]:
    """The words of the form without `--from`, which needs the command: it is named, or read from
    the script's name.
    """
    scripts = [script for word in request.launch if (script := script_of(word))]
    found = next(
        (name for name, trainers in ALL_TRAINERS.items() if scripts and scripts[0] in trainers), ""
    )
    command = request.trainer or found
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
    return [command, *(["--json"] if "--json" in request.switches else []), "--", *request.launch]


def migrate(command: str, sheet: Sheet) -> Migration:
    """The flags of `open-instruct COMMAND` for the run of a launch;

    `sheet` comes from `read_launch`.
    """
    objective = objective_named(command)
    flags = flags_of(objective.config_class)
    settle(command, sheet)
    for name in list(sheet.asked):
        _translate(command, name, flags, sheet)
    values = read_values(flags, sheet)
    drop_idle(flags, values, sheet)
    migration = Migration(dropped=sheet.dropped, refused=sheet.refused)
    for ours in sorted(values, key=lambda name: sheet.ours[name][1] not in sheet.given):
        words, source = sheet.ours[ours]
        here = default_here(flags[ours], sheet)
        if source not in sheet.given:
            if values[ours] == here:
                continue
            migration.defaults[ours] = {"upstream": values[ours], "here": here}
        elif source != ours:
            migration.renamed[source] = f"is --{' '.join([ours, *words])} here"
        migration.arguments.extend([f"--{ours}", *words])
    for what, (theirs, here) in (
        upstream_behaviours(command) | upstream_behaviours(sheet.trainer)
    ).items():
        migration.defaults[what] = {"upstream": theirs, "here": here}
    if not sheet.refused:
        # What a run would refuse is not had.
        for line in find_problems(objective, migration.arguments):
            flag, _, rest = line.partition(" ")
            _, source = sheet.ours.get(flag.removeprefix("--"), ([], flag.strip("-:")))
            sheet.refused[source] = rest or line
    deepspeed = ["--backend", "deepspeed", *sheet.deepspeed]
    if sheet.deepspeed and not find_problems(objective, [*migration.arguments, *deepspeed]):
        migration.deepspeed.extend(deepspeed)
    return migration


def _translate(command: str, name: str, flags: Mapping[str, Flag], sheet: Sheet) -> None:
    words = sheet.asked[name]
    tables = (upstream_table(sheet.trainer), upstream_table(command), upstream_table(EVERY))
    known = next((table[name] for table in tables if name in table), None)
    known = Entry(ours=name) if known is None and name in flags else known
    if known is None:
        sheet.refused[name] = (
            describe_name_here(name, flags, "--") or "is a flag neither of upstream's nor here"
        )
        return
    becomes = fate(known, words)
    if becomes.ours is not None:
        sheet.set(becomes.ours, becomes.words, name)
    elif becomes.refused is not None:
        sheet.refused[name] = becomes.refused
    elif name in sheet.given:
        sheet.dropped[name] = becomes.unneeded or ""
