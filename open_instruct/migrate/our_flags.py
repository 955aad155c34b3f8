"""What our parser makes of a sheet's flags: values, flags that nothing reads, refusals."""

from collections.abc import Mapping
from typing import Any

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import Flag, requirement_met
from open_instruct.core.errors import InputError
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.migrate.launch import Sheet
from open_instruct.objectives.objective import Objective


def read_values(flags: Mapping[str, Flag], sheet: Sheet) -> dict[str, Any]:
    """The values of our flags that the launch sets; one that is no value of its flag is refused."""
    values: dict[str, Any] = {}
    for ours, (words, source) in sheet.ours.items():
        try:
            values[ours] = flags[ours].value_of(words)
        except InputError as error:
            sheet.refused[source] = (
                str(error) if source == ours else f"is --{ours} here, which {error}"
            )
    return values


def drop_idle(flags: Mapping[str, Flag], values: dict[str, Any], sheet: Sheet) -> None:
    """Leave out the flags that a run would not read, until all that are left are read."""
    while True:
        everything = {name: flag.default for name, flag in flags.items()} | values
        idle = [
            name
            for name in values
            if flags[name].read_with and not requirement_met(flags[name].read_with, everything)
        ]
        if not idle:
            return
        for name in idle:
            del values[name]
            _, source = sheet.ours.pop(name)
            if source in sheet.given:
                sheet.dropped[source] = f"is read only with {flags[name].condition}"


def default_here(flag: Flag, sheet: Sheet) -> Any:
    """The default of our flag in this run; that of beta is the loss's own."""
    if flag.name == "beta" and flag.default is None:
        words, _ = sheet.ours.get("loss_type", (["dpo_norm"], ""))
        loss = next(iter(words), "")
        return PREFERENCE_LOSSES[loss].beta if loss in PREFERENCE_LOSSES else None
    return flag.default


def find_problems(objective: Objective, arguments: list[str]) -> list[str]:
    """The problems for which a run with these arguments would be refused."""
    try:
        objective.validate(parse_run(objective.config_class, arguments))
    except InputError as error:
        return str(error).splitlines()
    return []
