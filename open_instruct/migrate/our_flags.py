"""Reads a sheet's flags of ours as our parser does: values, flags nothing reads, refusals."""

from collections.abc import Mapping
from typing import Any

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import Flag, requirement_met
from open_instruct.core.errors import InputError
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.migrate.launch import Sheet
from open_instruct.objectives.objective import Objective


def read_values(flags: Mapping[str, Flag], sheet: Sheet) -> dict[str, Any]:
    """The values of our flags that the launch sets; the sheet refuses what a flag does not take."""
    values: dict[str, Any] = {}
    for ours, (words, source) in sheet.ours.items():
        try:
            values[ours] = flags[ours].parse_value(words)
        except InputError as error:
            sheet.refused[source] = str(error)
            if source != ours:
                sheet.refused[source] = f"is --{ours} here, which {error}"
    return values


def drop_idle(flags: Mapping[str, Flag], values: dict[str, Any], sheet: Sheet) -> None:
    """Leave out the flags that a run would not read, until all that are left are read."""
    while True:
        all_values = {name: flag.default for name, flag in flags.items()} | values
        idle = []
        for name in values:
            requirement = flags[name].requires
            if requirement and not requirement_met(requirement, all_values):
                idle.append(name)
        if not idle:
            return
        for name in idle:
            del values[name]
            _, source = sheet.ours.pop(name)
            if source in sheet.launch_flags:
                sheet.dropped[source] = f"is read only with {flags[name].condition}"


def find_default(flag: Flag, sheet: Sheet) -> Any:
    """The default of our flag in this run; that of beta is the loss's own."""
    if flag.name != "beta" or flag.default is not None:
        return flag.default
    words, _ = sheet.ours.get("loss_type", (["dpo_norm"], ""))
    if not words or words[0] not in PREFERENCE_LOSSES:
        return None
    return PREFERENCE_LOSSES[words[0]].beta


def find_problems(objective: Objective, arguments: list[str]) -> list[str]:
    """The problems for which a run with these arguments would be refused."""
    try:
        objective.validate(parse_run(objective.config_class, arguments))
    except InputError as error:
        return str(error).splitlines()
    return []
