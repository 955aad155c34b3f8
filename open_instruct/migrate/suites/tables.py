"""Tables of what each setting of another suite is called here, from this folder's YAML files.

A file has the suite's `name`, the files whose sections it goes on from (`like`), its `trainers` (of
each our command and the sections that hold for it, the most special first), the `older_names` of
settings, the word of one that is written down and not set (`unset`), and its `sections`. A section
may have

- `keys`: of each setting (or of several, with commas between) what becomes of it; see `Rule`
- `defaults`: what the suite takes for a setting that is left out, where that has a counterpart here
- `computed`: flags of ours that follow from several settings; see `Product`
- `needs`: flags of ours that nothing in a launch determines, with what to give
- `differs`: what is otherwise by no flag: there, and here, and perhaps settings with the values at
  which that is so
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from open_instruct.config.suites.upstream_flags import read_table

FOLDER = "open_instruct.migrate.suites"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of one setting.

    Example: `save_strategy: {as: checkpointing_steps, values: {epoch: "0", steps: null}}` is::

        Rule(flags=("checkpointing_steps",), values={"epoch": "0", "steps": "null"})

    Attributes:
        flags: ours that say it, each of them with all of the words.
        values: our words for a value, or for each word of it; `null` leaves the flag out.
        times: what a number is multiplied by, where the unit differs.
        share_of: another setting: the value is a number of its steps where it is 1 or more, and
            here a share of them.
        form: `whole` for names of data, of each of which all rows are taken; `commas` for a list in
            one word; `each` where every flag has one of the words.
        amount: with `whole`, the setting that says how many rows of each are taken, where it is
            given.
        column: the field of our rows that the value names a column for.
        part_of: a flag of ours that follows from it and other settings; see `Product`.
        unneeded: why it is left out, and the run learns the same.
        refused: why it cannot be had, but for the values in `unless`, which ask for nothing, and
            those in `values`.
        differs: what is otherwise about it here, though it is taken; without a flag, what it asks
            for in vain, but for the values in `unless`.
        when: another setting and a value of it (`>0`: any above 0), without which this one is not
            read there.
        otherwise: why it cannot be had where `when` does not hold; without it, it is left out
            there.
        repeat: another setting: the words stand as often as that says.
        prevails: whether it is heard where another setting says something else of the same flag.
    """

    flags: Sequence[str] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    times: float | None = None
    share_of: str | None = None
    form: str = ""
    amount: str | None = None
    column: str | None = None
    part_of: str | None = None
    unneeded: str | None = None
    refused: str | None = None
    unless: Sequence[str] = ()
    differs: str | None = None
    when: str = ""
    otherwise: str | None = None
    repeat: str | None = None
    prevails: bool = False

    @property
    def flag(self) -> str | None:
        """The first of the flags."""
        return self.flags[0] if self.flags else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A flag of ours that is a product and quotient of settings.

    Attributes:
        flag: ours.
        product: settings and numbers with `*` and `/` between; `num_gpus` and `num_rows` are what
            the user says.
        without: what to give, where neither this nor another product of the flag can be computed.

    Example: `{flag: num_learners_per_node, product: trainer.n_gpus_per_node * 1}`.
    """

    flag: str
    product: str
    without: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All that holds for one trainer of a suite."""

    suite: str
    command: str
    rules: Mapping[str, Rule]
    older_names: Mapping[str, str]
    unset: str | None
    defaults: Mapping[str, str]
    computed: Sequence[Product]
    needs: Mapping[str, str]
    differs: Mapping[str, Sequence[str]]


def find_trainers(suite: str) -> dict[str, str]:
    """Our command for each of the suite's trainers."""
    return {name: facts["command"] for name, facts in _read(suite)["trainers"].items()}


def find_suite_name(suite: str) -> str:
    """How the suite writes its name."""
    return str(_read(suite)["name"])


@cache
def find_table(suite: str, trainer: str) -> Table:
    """The rules of the suite's `trainer`; of several sections, the first with a setting holds."""
    facts = _read(suite)
    trainer_facts = facts["trainers"][trainer]
    names = [*trainer_facts.get("sections", [trainer]), "every"]
    sections = [facts["sections"].get(name, {}) for name in names]
    for other in facts.get("like", []):
        sections += _read(other)["sections"].values()
    products = []
    for section in sections:
        products += [Product(**product) for product in section.get("computed", [])]
    rules: dict[str, Rule] = {}
    defaults: dict[str, str] = {}
    needs: dict[str, str] = {}
    differs: dict[str, Sequence[str]] = {}
    for section in reversed(sections):
        for keys, rule in section.get("keys", {}).items():
            rules |= dict.fromkeys(keys.split(", "), _build_rule(**rule))
        defaults |= section.get("defaults", {})
        needs |= section.get("needs", {})
        differs |= section.get("differs", {})
    return Table(
        suite=facts["name"],
        command=trainer_facts["command"],
        rules=rules,
        older_names=facts.get("older_names", {}),
        unset=facts.get("unset"),
        defaults=defaults,
        computed=products,
        needs=needs,
        differs=differs,
    )


def _build_rule(**facts: Any) -> Rule:
    """A rule from its entry in a file, whose values are all texts."""
    if "times" in facts:
        facts["times"] = float(facts["times"])
    prevails = facts.pop("prevails", "false") == "true"
    flags = tuple(facts.pop("as", "").split())
    return Rule(flags=flags, prevails=prevails, **facts)


def _read(suite: str) -> dict[str, Any]:
    return read_table(f"{suite}.yaml", package=FOLDER)
