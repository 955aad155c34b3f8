"""Translates the settings of another suite's launch into our flags, by the tables of `suites`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from open_instruct.config.flags import Flag, list_flags
from open_instruct.config.name_hints import suggest_nearest
from open_instruct.migrate.launch import Sheet
from open_instruct.migrate.launch_values import LaunchValues
from open_instruct.migrate.our_flags import drop_idle, find_default, find_problems, read_values
from open_instruct.migrate.rules import find_family_problem
from open_instruct.migrate.suites.rule_values import (
    LEFT_OUT,
    divide_by_steps,
    is_refused,
    translate_words,
)
from open_instruct.migrate.suites.settings import Settings
from open_instruct.migrate.suites.tables import Product, Rule, Table
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import load_objective

MAX_NODES = 10_000
# Words for a flag that a run needs and the launch does not give.
PLACEHOLDERS = {
    "model_name_or_path": ["MODEL"],
    "mixer_list": ["ROWS.jsonl", "1.0"],
    "dataset_mixer_list": ["PROMPTS.jsonl", "1.0"],
    "teacher_model_name_or_path": ["TEACHER"],
    "output_dir": ["OUT"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A launch of another suite in our flags.

    Attributes:
        suite: the suite that the launch is for.
        command: the command of ours that does the same.
        arguments: the words of each flag; first those of settings that the launch gives.
        renamed: for each setting that is given and translated, what it is here.
        dropped: for each that is left out, why nothing is learned differently.
        refused: for each that cannot be translated, why.
        missing: for each flag that the launch does not determine, what to give.
        defaults: of flags for which the launch gives no setting, the default `there` and `here`,
            where these differ; `arguments` has that of `there`.
        differs: what no flag changes, `there` and `here`; or a sentence about a setting.
    """

    suite: str
    command: str
    arguments: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    differs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether everything that the launch sets is translated or changes nothing."""
        return not self.refused and not self.missing

    @property
    def words(self) -> list[str]:
        """The arguments as a command line has them."""
        line: list[str] = []
        for name, words in self.arguments.items():
            line += [f"--{name}", *words]
        return line


def translate(table: Table, settings: Settings, numbers: Mapping[str, float]) -> Translation:
    """The flags of `table.command` for the run that `settings` describe.

    Args:
        numbers: what the user says beside the settings: the `num_gpus` that learn, and the
            `num_rows` of data.
    """
    return _Translator(table, settings, numbers).run()


class _Translator:
    """Translates one launch, setting by setting, onto a sheet."""

    def __init__(self, table: Table, settings: Settings, numbers: Mapping[str, float]) -> None:
        self.table = table
        self.settings = settings
        self.objective: Objective = load_objective(table.command)
        self.flags: dict[str, Flag] = list_flags(self.objective.config_class)
        self.sheet = _open_sheet(table, settings)
        self.values = LaunchValues(table, self.sheet, numbers)
        self.computed: set[str] = set()
        # Of each field of our rows the column, and the setting behind it.
        self.columns: dict[str, str] = {}
        self.result = Translation(
            suite=table.suite,
            command=table.command,
            dropped=self.sheet.dropped,
            refused=self.sheet.refused,
        )

    def run(self) -> Translation:
        sheet = self.sheet
        for name, how in self.settings.unreadable.items():
            self._refuse_unreadable(name, how)
        self._compute()
        rules = {name: self._find_rule(name) for name in sheet.theirs}
        for name in sorted(rules, key=lambda name: _find_turn(rules[name])):
            self._translate(name, rules[name])
        self._set_columns()
        values = read_values(self.flags, sheet)
        self._refuse_unknown_family()
        self._drop_idle(values)
        # Flags of the launch come first, then defaults.
        for flag in sorted(values, key=lambda name: sheet.ours[name][1] not in sheet.launch_flags):
            self._write_flag(flag, values[flag])
        for what, (there, here, *conditions) in self.table.differs.items():
            if all(map(self.values.meets, conditions)):
                self.result.differs[what] = {"there": there, "here": here}
        self._fill_in_missing()
        self._leave_out_refused()
        return self.result

    def _drop_idle(self, values: dict[str, Any]) -> None:
        """Leave out flags that nothing reads, but keep a setting of which another flag is read."""
        before = set(self.sheet.dropped)
        drop_idle(self.flags, values, self.sheet)
        for _, source in self.sheet.ours.values():
            if source not in before:
                self.sheet.dropped.pop(source, None)

    def _refuse_unknown_family(self) -> None:
        words, source = self.sheet.ours.get("model_name_or_path", ([], ""))
        reason = find_family_problem(" ".join(words))
        if reason:
            self.sheet.refused[source] = reason

    def _refuse_unreadable(self, name: str, how: str) -> None:
        rule = self._find_rule(name)
        if rule is not None and rule.flag is not None and self._is_said_elsewhere(rule.flag):
            return
        if rule is not None and rule.unneeded is not None:
            self.sheet.dropped[name] = rule.unneeded
            return
        reason = f"is only known when the launch runs ({how})"
        if rule is not None and rule.flag:
            reason += f"; here it is --{rule.flag}"
        self.sheet.refused[name] = f"{reason}: write its value"

    def _is_said_elsewhere(self, flag: str) -> bool:
        """Whether a setting whose value is known says the same flag of ours."""
        rules = map(self._find_rule, self.settings.values)
        return any(rule is not None and rule.flag == flag for rule in rules)

    def _find_rule(self, name: str) -> Rule | None:
        rules = self.table.rules
        if name in rules:
            return rules[name]
        for pattern, rule in rules.items():
            if "*" in pattern and fnmatchcase(name, pattern):
                return rule
        return None

    def _translate(self, name: str, rule: Rule | None) -> None:
        words = self.sheet.theirs[name]
        if rule is not None and rule.when and not self.values.meets(rule.when):
            self._leave_unread(name, rule, words)
        elif rule is None:
            hint = suggest_nearest(name, self.table.rules)
            self._refuse(name, f"is no setting of {self.table.suite} that is known here{hint}")
        elif is_refused(rule, words):
            self._refuse(name, rule.refused or "")
        elif rule.column is not None:
            self._name_column(name, rule.column, words)
        elif rule.part_of is not None:
            self._note_part(name, rule, rule.part_of)
        elif rule.flag is not None and rule.flag not in self.flags:
            command = f"open-instruct {self.table.command}"
            self._refuse(name, f"is --{rule.flag} of other commands, which {command} has not")
        elif rule.flag is None and rule.differs is not None:
            self._note_difference(name, rule, words)
        elif rule.flag is None or translate_words(rule, words) == [LEFT_OUT]:
            self._drop(name, rule.unneeded or "asks for nothing")
        else:
            self._set_flags(name, rule, words)

    def _leave_unread(self, name: str, rule: Rule, words: list[str]) -> None:
        """A setting beside one that it is not read with, there or here."""
        if rule.otherwise is not None and " ".join(words).lower() not in rule.unless:
            self._refuse(name, rule.otherwise)
        else:
            self._drop(name, f"is read with {rule.when} alone")

    def _set_flags(self, name: str, rule: Rule, words: list[str]) -> None:
        assert rule.flag is not None
        if rule.share_of is not None:
            steps = self.values.read_number(rule.share_of)
            share = divide_by_steps(words, steps)
            if share is None:
                share_form = f"here --{rule.flag} is their share of all: 10 of 200 steps are 0.05"
                self._refuse(name, f"is a number of steps, and {share_form}")
                return
            words = [share]
        words = translate_words(rule, words)
        amount_name = self.values.find_name(rule.amount or "")
        if (
            amount_name in self.sheet.launch_flags
            and self.values.read_number(amount_name) is not None
        ):
            amount = self.sheet.theirs[amount_name]
            data_sets = words[::2]
            words = []
            for data_set in data_sets:
                words += [data_set, *amount]
        if rule.repeat is not None:
            words = words * min(int(self.values.read_number(rule.repeat) or 1), MAX_NODES)
        for place, flag in enumerate(rule.flags):
            its_words = words[place : place + 1] if rule.form == "each" else words
            self.sheet.set(flag, its_words, name)
        if rule.differs is not None and name in self.sheet.launch_flags:
            self.result.differs[name] = rule.differs

    def _refuse(self, name: str, why: str) -> None:
        """A default that cannot be had is nothing that the launch asks for."""
        if name in self.sheet.launch_flags:
            self.sheet.refused[name] = why

    def _drop(self, name: str, why: str) -> None:
        if name in self.sheet.launch_flags:
            self.sheet.dropped[name] = why

    def _note_difference(self, name: str, rule: Rule, words: list[str]) -> None:
        if " ".join(words).lower() in rule.unless:
            self._drop(name, "is how it is here")
        elif name in self.sheet.launch_flags:
            self.result.differs[name] = rule.differs

    def _note_part(self, name: str, rule: Rule, flag: str) -> None:
        if name not in self.sheet.launch_flags:
            return
        if " ".join(self.sheet.theirs[name]).lower() in rule.unless:
            self.sheet.dropped[name] = "asks for nothing"
        elif flag in self.sheet.ours:
            value = " ".join(self.sheet.ours[flag][0])
            self.result.renamed[name] = f"is a part of --{flag} {value}"
            if rule.differs is not None:
                self.result.differs[name] = rule.differs
        elif flag in self.result.missing:
            self.result.renamed[name] = f"is a part of --{flag}, which see"
        else:
            self.sheet.refused[name] = (
                f"is a part of --{flag} here, and does not go with the other settings"
            )

    def _name_column(self, name: str, column: str, words: list[str]) -> None:
        words = list(dict.fromkeys(words))  # of several data sets
        if len(words) > 1:
            self._refuse(
                name, "is a column by another name in each data set: here all have the same columns"
            )
        elif words in ([column], ["none"], []):
            self._drop(name, "names the column that is read anyway")
        elif column in self.columns:
            rows = "rows of all data sets have the same columns here"
            self._refuse(name, f"is a second column for {column}: {rows}")
        else:
            self.columns[column] = name

    def _set_columns(self) -> None:
        if not self.columns:
            return
        pairs = [f"{column}={self.sheet.theirs[name][0]}" for column, name in self.columns.items()]
        self.sheet.set("columns", pairs, next(iter(self.columns.values())))
        for pair, name in zip(pairs, self.columns.values(), strict=True):
            if name in self.sheet.launch_flags:
                self.result.renamed[name] = f"is --columns {pair}"

    def _compute(self) -> None:
        """Set each flag that is a product of settings, by the first product that is known."""
        products: dict[str, list[Product]] = {}
        for product in self.table.computed:
            products.setdefault(product.flag, []).append(product)
        for flag, alternatives in products.items():
            if flag in self.flags:
                self._compute_flag(flag, alternatives)

    def _compute_flag(self, flag: str, alternatives: list[Product]) -> None:
        is_fraction = self.flags[flag].kind is float
        for product in alternatives:
            number = self.values.multiply(product, is_fraction=is_fraction)
            if number is not None:
                self.sheet.set(flag, [number], self.values.find_source(product))
                self.computed.add(flag)
                return
        hint = alternatives[-1].without
        if hint:
            self.result.missing[flag] = hint

    def _write_flag(self, flag: str, value: Any) -> None:
        """Write a flag: with the value that the launch gives, or a default that differs here."""
        words, source = self.sheet.ours[flag]
        here = find_default(self.flags[flag], self.sheet)
        is_as_given = source == flag and words == self.settings.values.get(source)
        if source == "num_gpus":
            self.result.renamed[source] = f"is --{' '.join([flag, *words])} here"
        elif source not in self.sheet.launch_flags:
            if value == here:
                return
            self.result.defaults[flag] = {"there": value, "here": here}
        elif flag not in self.computed and not is_as_given:
            self.result.renamed.setdefault(source, f"is --{' '.join([flag, *words])} here")
        self.result.arguments[flag] = words

    def _fill_in_missing(self) -> None:
        for name, what in self.table.needs.items():
            if name not in self.result.arguments:
                self.result.missing[name] = what
        self._fill_in_required()

    def _fill_in_required(self) -> None:
        for flag in self.flags.values():
            if flag.required and flag.name not in self.result.arguments:
                words = PLACEHOLDERS[flag.name]
                self.result.arguments[flag.name] = words
                what = f"is not in the launch: write it in place of {' '.join(words)}"
                self.result.missing.setdefault(flag.name, what)

    def _leave_out_refused(self) -> None:
        """Leave out what our own command would refuse, so that it takes the rest."""
        while problems := find_problems(self.objective, self.result.words):
            flag, line = self._find_refused_flag(problems)
            if flag not in self.result.arguments:
                self.result.refused["all of it"] = line
                return
            _, source = self.sheet.ours.pop(flag)
            del self.result.arguments[flag]
            self.result.defaults.pop(flag, None)
            self.result.renamed.pop(source, None)
            self.result.refused[source] = line
            self._fill_in_required()

    def _find_refused_flag(self, problems: list[str]) -> tuple[str, str]:
        """The first flag of the launch that a problem names, and the problem; else "" and one."""
        for line in problems:
            for word in line.split():
                flag = word.strip("-:,;")
                if word.startswith("--") and flag in self.sheet.ours:
                    return flag, line
        return "", problems[0]


def _open_sheet(table: Table, settings: Settings) -> Sheet:
    """The sheet of a launch, with the suite's defaults for what the launch does not set."""
    unset = [name for name, words in settings.values.items() if words == [table.unset]]
    names = frozenset(settings.values.keys() | settings.unreadable.keys()) - set(unset)
    theirs = {name: list(words) for name, words in settings.values.items() if name in names}
    for name, value in table.defaults.items():
        if name not in names:
            theirs[name] = value.split()
    sheet = Sheet(trainer=settings.trainer, theirs=theirs, launch_flags=names)
    sheet.dropped.update(dict.fromkeys(unset, "has no value"))
    return sheet


def _find_turn(rule: Rule | None) -> int:
    """When a rule is applied: first ordinary ones, then those that prevail, then parts of flags."""
    if rule is not None and rule.part_of is not None:
        return 2
    return int(rule is not None and rule.prevails)
