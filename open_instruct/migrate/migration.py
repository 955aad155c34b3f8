"""`open-instruct migrate-args`: from a launch of open-instruct to the same run in our flags, with all that differs."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.config.flags import Flag, flags_of, is_met, spelled
from open_instruct.config.help import asks_for_help
from open_instruct.config.parser import called_here, parse
from open_instruct.config.suites.upstream_flags import EVERY, Entry, fate, upstream_behaviours, upstream_table
from open_instruct.errors import EXIT_INPUT, InputError
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.migrate.launch import ALL_TRAINERS, Sheet, read_launch
from open_instruct.migrate.rules import settle
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import objective_named
from open_instruct.wording import pages_in

USAGE = f"""\
usage: open-instruct migrate-args {"|".join(ALL_TRAINERS)} [--json] -- ARGS...
       open-instruct migrate-args {"|".join(ALL_TRAINERS)} [--json] FILE.yaml

Tells a launch of open-instruct (of prm: of TRL or OpenRLHF) in our flags: what is called otherwise, what is left out
and why, what cannot be had, and every default that differs. ARGS may be the whole line, launcher and script included.
Nothing is started. The exit code is 0 where the run is the same, and 2 where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A launch in our flags.

    Attributes:
        arguments: the words behind `open-instruct COMMAND`; also what brings upstream's defaults.
        deepspeed: the words after these that make it a run on DeepSpeed, where the launch names a stage of that.
        renamed, dropped, refused: a sentence for each of upstream's flags. Where none is refused, the run is the same.
        defaults: of our flags that the launch leaves out, the default `upstream` and `here`, where they differ; and
            what differs by no flag.
    """

    arguments: list[str] = field(default_factory=list)
    deepspeed: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str]
    refused: Mapping[str, str]
    defaults: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def migrate_args(words: Sequence[str]) -> int:
    """Print the migration that `words` ask for; returns the exit code."""
    end = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:end], words[end + 1 :]
    if not ours or asks_for_help(ours):
        print(USAGE)
        return 0 if ours else EXIT_INPUT
    as_json = "--json" in ours
    command, *rest = [word for word in ours if word != "--json"]
    if command not in ALL_TRAINERS:
        raise InputError(
            f"'{command}' has no launches upstream; use one of {', '.join(ALL_TRAINERS)}", kind="stray_word"
        )
    if flags := [word for word in rest if word.startswith("--")]:
        raise InputError(
            f"{flags[0]} stands before --: write migrate-args {command} [--json] -- ARGS...", kind="unreadable_file"
        )
    migration = migrate(command, read_launch(command, [*rest, *theirs]))
    if as_json:
        print(json.dumps(asdict(migration), indent=2))
    else:
        pages = pages_in(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
        names = {"command": command, "migration": migration, "spelled": spelled, "shlex": shlex}
        print(pages.get_template("migration.txt.jinja").render(names))
    return EXIT_INPUT if migration.refused else 0


def migrate(command: str, sheet: Sheet) -> Migration:
    """The flags of `open-instruct COMMAND` for the run of a launch; `sheet` comes from `read_launch`."""
    objective = objective_named(command)
    flags = flags_of(objective.config_class)
    settle(command, sheet)
    for name in list(sheet.asked):
        _translate(command, name, flags, sheet)
    values = _values(flags, sheet)
    _drop_idle(flags, values, sheet)
    migration = Migration(dropped=sheet.dropped, refused=sheet.refused)
    for ours in sorted(values, key=lambda name: sheet.ours[name][1] not in sheet.given):
        words, source = sheet.ours[ours]
        here = _default_here(flags[ours], sheet)
        if source not in sheet.given:
            if values[ours] == here:
                continue
            migration.defaults[ours] = {"upstream": values[ours], "here": here}
        elif source != ours:
            migration.renamed[source] = f"is --{' '.join([ours, *words])} here"
        migration.arguments.extend([f"--{ours}", *words])
    for what, (theirs, here) in (upstream_behaviours(command) | upstream_behaviours(sheet.trainer)).items():
        migration.defaults[what] = {"upstream": theirs, "here": here}
    if not sheet.refused:
        # What a run would refuse is not had.
        for line in _problems(objective, migration.arguments):
            flag, _, rest = line.partition(" ")
            _, source = sheet.ours.get(flag.removeprefix("--"), ([], flag.strip("-:")))
            sheet.refused[source] = rest or line
    deepspeed = ["--backend", "deepspeed", *sheet.deepspeed]
    if sheet.deepspeed and not _problems(objective, [*migration.arguments, *deepspeed]):
        migration.deepspeed.extend(deepspeed)
    return migration


def _values(flags: Mapping[str, Flag], sheet: Sheet) -> dict[str, Any]:
    """The values of our flags that the launch sets; one that is no value of its flag is refused."""
    values: dict[str, Any] = {}
    for ours, (words, source) in sheet.ours.items():
        try:
            values[ours] = flags[ours].value_of(words)
        except InputError as error:
            sheet.refused[source] = str(error) if source == ours else f"is --{ours} here, which {error}"
    return values


def _drop_idle(flags: Mapping[str, Flag], values: dict[str, Any], sheet: Sheet) -> None:
    """Leave out the flags that a run would not read, until all that are left are read."""
    while True:
        everything = {name: flag.default for name, flag in flags.items()} | values
        idle = [name for name in values if flags[name].read_with and not is_met(flags[name].read_with, everything)]
        if not idle:
            return
        for name in idle:
            del values[name]
            _, source = sheet.ours.pop(name)
            if source in sheet.given:
                sheet.dropped[source] = f"is read only with {flags[name].condition}"


def _translate(command: str, name: str, flags: Mapping[str, Flag], sheet: Sheet) -> None:
    words = sheet.asked[name]
    tables = (upstream_table(sheet.trainer), upstream_table(command), upstream_table(EVERY))
    known = next((table[name] for table in tables if name in table), None)
    known = Entry(ours=name) if known is None and name in flags else known
    if known is None:
        sheet.refused[name] = called_here(name, flags, "--") or "is a flag neither of upstream's nor here"
        return
    becomes = fate(known, words)
    if becomes.ours is not None:
        sheet.set(becomes.ours, becomes.words, name)
    elif becomes.refused is not None:
        sheet.refused[name] = becomes.refused
    elif name in sheet.given:
        sheet.dropped[name] = becomes.unneeded or ""


def _default_here(flag: Flag, sheet: Sheet) -> Any:
    if flag.name == "beta" and flag.default is None:
        (loss, *_), _ = sheet.ours.get("loss_type", (["dpo_norm"], ""))
        return PREFERENCE_LOSSES[loss].beta if loss in PREFERENCE_LOSSES else None
    return flag.default


def _problems(objective: Objective, arguments: list[str]) -> list[str]:
    """The problems for which a run with these arguments would be refused."""
    try:
        objective.validate(parse(objective.config_class, arguments))
    except InputError as error:
        return str(error).splitlines()
    return []
