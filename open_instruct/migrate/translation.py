"""From the settings of another suite's launch to flags of ours, by the tables of `suites`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from open_instruct.config.flags import LARGEST_INT, Flag, flags_of
from open_instruct.config.parser import nearest
from open_instruct.migrate.launch import Sheet
from open_instruct.migrate.our_flags import default_here, drop_idle, find_problems, read_values
from open_instruct.migrate.rules import family_problem
from open_instruct.migrate.suites.rule_values import (
    LEFT_OUT,
    is_refused,
    share_of_steps,
    words_here,
)
from open_instruct.migrate.suites.settings import Settings
from open_instruct.migrate.suites.tables import Product, Rule, Table
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import objective_named

MOST_NODES = 10_000
# What stands in the command for a flag that a run needs and the launch does not give.
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
        suite, command: whose launch it is, and the command of ours that does the same.
        arguments: the words of each flag, those of settings that are given first.
        renamed: for each setting that is given and translated, what it is here.
        dropped: for each that is left out, why nothing is learned differently.
        refused: for each that cannot be had, why.
        missing: for each flag that the launch does not determine, what to give.
        defaults: of flags for which the launch gives no setting, the default `there` and `here`,
            where these differ; `arguments` has what is there.
        differs: what is otherwise by no flag, `there` and `here`; or a sentence about a setting.
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
        return [word for name, words in self.arguments.items() for word in (f"--{name}", *words)]


def translate(table: Table, settings: Settings, known: Mapping[str, float]) -> Translation:
    """The flags of `table.command` for the run that `settings` describe.

    Args:
        known: what is known beside the settings: `num_gpus` that learn, and `num_rows` of data.
    """
    return _Translator(table, settings, known).run()


class _Translator:
    """Translates one launch, setting by setting, onto a sheet."""

    def __init__(self, table: Table, settings: Settings, known: Mapping[str, float]) -> None:
        self.table = table
        self.settings = settings
        self.known = dict(known)
        self.objective: Objective = objective_named(table.command)
        self.flags: dict[str, Flag] = flags_of(self.objective.config_class)
        unset = [name for name, words in settings.values.items() if words == [table.unset]]
        given = (settings.values.keys() | settings.unreadable.keys()) - set(unset)
        defaults = {
            name: value.split() for name, value in table.defaults.items() if name not in given
        }
        self.sheet = Sheet(
            trainer=settings.trainer,
            asked={name: list(words) for name, words in settings.values.items() if name in given}
            | defaults,
            given=frozenset(given),
        )
        self.sheet.dropped.update(dict.fromkeys(unset, "has no value"))
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
        rules = {name: self._rule(name) for name in sheet.asked}
        for name in sorted(rules, key=lambda name: _place(rules[name])):
            self._translate(name, rules[name])
        self._set_columns()
        values = read_values(self.flags, sheet)
        self._refuse_unknown_family()
        self._drop_idle(values)
        for flag in sorted(values, key=lambda name: sheet.ours[name][1] not in sheet.given):
            self._take(flag, values[flag])
        for what, (there, here, *condition) in self.table.differs.items():
            if all(map(self._is_read, condition)):
                self.result.differs[what] = {"there": there, "here": here}
        self._fill_in_missing()
        self._leave_out_refused()
        return self.result

    def _drop_idle(self, values: dict[str, Any]) -> None:
        """Leave out flags that nothing reads; a setting of which another flag is read is not left
        out for that.
        """
        before = dict(self.sheet.dropped)
        drop_idle(self.flags, values, self.sheet)
        for source in {source for _, source in self.sheet.ours.values()} - before.keys():
            self.sheet.dropped.pop(source, None)

    def _refuse_unknown_family(self) -> None:
        words, source = self.sheet.ours.get("model_name_or_path", ([], ""))
        if reason := family_problem(" ".join(words)):
            self.sheet.refused[source] = reason

    def _refuse_unreadable(self, name: str, how: str) -> None:
        rule = self._rule(name)
        if rule is not None and rule.flag is not None and self._is_said_elsewhere(rule.flag):
            return
        if rule is not None and rule.unneeded is not None:
            self.sheet.dropped[name] = rule.unneeded
            return
        here = f"; here it is --{rule.flag}" if rule is not None and rule.flag else ""
        self.sheet.refused[name] = (
            f"is only known when the launch runs ({how}){here}: write its value"
        )

    def _name_in_launch(self, name: str) -> str:
        """The name by which the launch gives a setting: an older one, where it has that."""
        older = self.table.older_names.get(name, name)
        return older if older in self.sheet.given else name

    def _is_read(self, condition: str) -> bool:
        """Whether a setting has the value that another one is read with."""
        name, value = condition.rsplit(" ", 1)
        if value == ">0":
            return self._number(name) is not None
        return " ".join(self.sheet.asked.get(self._name_in_launch(name), [])).lower() == value

    def _is_said_elsewhere(self, flag: str) -> bool:
        """Whether a setting whose value is known says the same flag of ours."""
        rules = map(self._rule, self.settings.values)
        return any(rule is not None and rule.flag == flag for rule in rules)

    def _rule(self, name: str) -> Rule | None:
        rules = self.table.rules
        if name in rules:
            return rules[name]
        return next(
            (rule for form, rule in rules.items() if "*" in form and fnmatchcase(name, form)), None
        )

    def _translate(self, name: str, rule: Rule | None) -> None:
        words = self.sheet.asked[name]
        if rule is not None and rule.when and not self._is_read(rule.when):
            self._leave_unread(name, rule, words)
        elif rule is None:
            hint = nearest(name, self.table.rules)
            self._refuse(name, f"is no setting of {self.table.suite} that is known here{hint}")
        elif is_refused(rule, words):
            self._refuse(name, rule.refused or "")
        elif rule.column is not None:
            self._name_column(name, rule.column, words)
        elif rule.part_of is not None:
            self._note_part(name, rule, rule.part_of)
        elif rule.flag is not None and rule.flag not in self.flags:
            self._refuse(
                name,
                (
                    f"is --{rule.flag} of other commands, which open-instruct {self.table.command} "
                    "has not"
                ),
            )
        elif rule.flag is None and rule.differs is not None:
            self._note_difference(name, rule, words)
        elif rule.flag is None or words_here(rule, words) == [LEFT_OUT]:
            self._drop(name, rule.unneeded or "asks for nothing")
        else:
            self._set(name, rule, words)

    def _leave_unread(self, name: str, rule: Rule, words: list[str]) -> None:
        """A setting beside one that it is not read with, there or here."""
        if rule.otherwise is not None and " ".join(words).lower() not in rule.unless:
            self._refuse(name, rule.otherwise)
        else:
            self._drop(name, f"is read with {rule.when} alone")

    def _set(self, name: str, rule: Rule, words: list[str]) -> None:
        assert rule.flag is not None
        if rule.share_of is not None:
            steps = self._number(rule.share_of)
            share = share_of_steps(words, steps)
            if share is None:
                share_form = f"here --{rule.flag} is their share of all: 10 of 200 steps are 0.05"
                self._refuse(name, f"is a number of steps, and {share_form}")
                return
            words = [share]
        words = words_here(rule, words)
        amount_name = self._name_in_launch(rule.amount or "")
        if amount_name in self.sheet.given and self._number(amount_name) is not None:
            amount = self.sheet.asked[amount_name]
            words = [part for word in words[::2] for part in (word, *amount)]
        if rule.repeat is not None:
            words = words * min(int(self._number(rule.repeat) or 1), MOST_NODES)
        for place, flag in enumerate(rule.flags):
            self.sheet.set(flag, words[place : place + 1] if rule.form == "each" else words, name)
        if rule.differs is not None and name in self.sheet.given:
            self.result.differs[name] = rule.differs

    def _refuse(self, name: str, why: str) -> None:
        """A default that cannot be had is nothing that the launch asks for."""
        if name in self.sheet.given:
            self.sheet.refused[name] = why

    def _drop(self, name: str, why: str) -> None:
        if name in self.sheet.given:
            self.sheet.dropped[name] = why

    def _note_difference(self, name: str, rule: Rule, words: list[str]) -> None:
        if " ".join(words).lower() in rule.unless:
            self._drop(name, "is how it is here")
        elif name in self.sheet.given:
            self.result.differs[name] = rule.differs

    def _note_part(self, name: str, rule: Rule, flag: str) -> None:
        if name not in self.sheet.given:
            return
        if " ".join(self.sheet.asked[name]).lower() in rule.unless:
            self.sheet.dropped[name] = "asks for nothing"
        elif flag in self.sheet.ours:
            self.result.renamed[name] = (
                f"is a part of --{flag} {' '.join(self.sheet.ours[flag][0])}"
            )
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
            self._refuse(
                name,
                (
                    f"is a second column for {column}: rows of all data sets have the same columns "
                    "here"
                ),
            )
        else:
            self.columns[column] = name

    def _set_columns(self) -> None:
        if not self.columns:
            return
        pairs = [f"{column}={self.sheet.asked[name][0]}" for column, name in self.columns.items()]
        self.sheet.set("columns", pairs, next(iter(self.columns.values())))
        for pair, name in zip(pairs, self.columns.values(), strict=True):
            if name in self.sheet.given:
                self.result.renamed[name] = f"is --columns {pair}"

    def _compute(self) -> None:
        """Set the flags that follow from several settings; of one flag's products the first that
        can be computed.
        """
        products: dict[str, list[Product]] = {}
        for product in self.table.computed:
            products.setdefault(product.flag, []).append(product)
        for flag, ways in products.items():
            if flag not in self.flags:
                continue
            is_fraction = self.flags[flag].kind is float
            numbers = ((self._product(way.product, is_fraction), way) for way in ways)
            number, way = next(
                ((number, way) for number, way in numbers if number is not None), (None, ways[-1])
            )
            if number is not None:
                self.sheet.set(flag, [number], self._source(way))
                self.computed.add(flag)
            elif way.without:
                self.result.missing[flag] = way.without

    def _source(self, way: Product) -> str:
        """The setting that a computed flag is said to come from: a given one before a default."""
        factors = [self._name_in_launch(part) for part in way.product.split()]
        factors = [name for name in factors if name in self.sheet.asked]
        given = [name for name in factors if name in self.sheet.given]
        return next(iter([*given, *factors]), "num_gpus")

    def _product(self, product: str, is_fraction: bool) -> str | None:
        """The value of `a * b / c`;

        None where a factor is not known, or it has to be whole and is not.
        """
        result, operator = 1.0, "*"
        for part in product.split():
            if part in ("*", "/"):
                operator = part
                continue
            number = self._number(part)
            if number is None:
                return None
            result = result * number if operator == "*" else result / number
        if result.is_integer():
            return str(int(result))
        return f"{result:g}" if is_fraction else None

    def _number(self, name: str) -> float | None:
        """A factor that is above 0: a number, what the user says, or a setting."""
        word = str(
            self.known.get(name, " ".join(self.sheet.asked.get(self._name_in_launch(name), [name])))
        )
        try:
            number = float(word)
        except ValueError:
            return None
        return number if 0 < number <= LARGEST_INT else None

    def _take(self, flag: str, value: Any) -> None:
        """Write a flag with its value: one that is given, or a default that differs from ours."""
        words, source = self.sheet.ours[flag]
        here = default_here(self.flags[flag], self.sheet)
        if source == "num_gpus":
            self.result.renamed[source] = f"is --{' '.join([flag, *words])} here"
        elif source not in self.sheet.given:
            if value == here:
                return
            self.result.defaults[flag] = {"there": value, "here": here}
        elif flag not in self.computed and (
            source != flag or words != self.settings.values.get(source)
        ):
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
            named = [
                (word.strip("-:,;"), line)
                for line in problems
                for word in line.split()
                if word.startswith("--")
            ]
            flag, line = next(
                ((flag, line) for flag, line in named if flag in self.sheet.ours), ("", problems[0])
            )
            if flag not in self.result.arguments:
                self.result.refused["all of it"] = line
                return
            _, source = self.sheet.ours.pop(flag)
            del self.result.arguments[flag]
            self.result.defaults.pop(flag, None)
            self.result.renamed.pop(source, None)
            self.result.refused[source] = line
            self._fill_in_required()


def _place(rule: Rule | None) -> int:
    """Rules that prevail come after the others, and then those of settings that are a part of what
    these have set.
    """
    if rule is None:
        return 0
    return 2 if rule.part_of is not None else int(rule.prevails)
