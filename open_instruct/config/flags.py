"""What a flag is: its type, how words become its value, and how messages describe it.

Vocabulary: a *config class* is a dataclass whose fields are *sections*; a section is a dataclass
whose fields are *flags* (made by `sections.flag`). A *word* is one argument of the command line
or one scalar of a YAML file; both spell values the same way.
"""

import math
import operator
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from open_instruct.core.errors import InputError
from open_instruct.core.text import join_choices

NONE_WORDS = ("none", "null", "~")
# Large enough for seeds and time-outs; the product of a few such numbers is still a finite float.
LARGEST_INT = 2**31 - 1
LONGEST_SHOWN = 60
OWN = "FILE.py:FUNCTION"  # a function of the user's own, in usage lines
# Other trainers' names for some of the choices of our flags.
OTHER_WORDS = {
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo_norm",
    "bf16": "bfloat16",
    "fp32": "float32",
}
# How a value is written in usage lines and in error messages, by the kind of the flag and of a
# list's items.
KINDS: dict[tuple[type, type], tuple[str, str]] = {
    (bool, str): ("true|false", "true or false"),
    (int, str): ("INT", "a whole number"),
    (float, str): ("FLOAT", "a number"),
    (str, str): ("STR", "a word"),
    (list, int): ("INT ...", "a list of whole numbers"),
    (list, float): ("FLOAT ...", "a list of numbers"),
    (list, str): ("WORD ...", "a list of words"),
}
# Sections that come last in every config, in this order.
LAST_SECTIONS = ("optim", "parallel", "fleet", "memory", "evaluation", "run", "logging")


# What a changed value means when a run resumes. same: another run. length: another schedule, unless
# that is flat. batch: no change, as long as the global batch has as many rows. free: no change.
Resume = Literal["same", "length", "batch", "free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of one section.

    Example: `max_train_steps: int | None = flag("stop after so many steps", None)` in a section
    that the config class holds as `optim` is::

        Flag(name="max_train_steps", section="optim", kind=int, choices=(), optional=True,
             required=False, default=None, help="stop after so many steps")
    """

    name: str
    section: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any
    help: str
    item_kind: type = str  # of a list's items
    or_one: bool = False  # of a list: a single word gives that item itself, not a list of one
    resume: Resume = "same"
    is_path: bool = False  # `~` and `$NAME` in it are filled in
    takes_own: bool = False  # beside the choices, `FILE.py:function` or `module:function`
    replaces: str = ""  # flags of a file whose place this one takes where it is on the command line
    # Another flag, perhaps with its values, without which nothing reads this one
    # (`requirement_met`).
    requires: str = ""
    # The range that a number must lie in, and the end of the message of one that does not.
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    note: str = ""

    @property
    def other(self) -> str:
        """The flag that this one is read with, the first of several; empty if it is always read."""
        return self.requires.partition(" ")[0].partition("|")[0]

    @property
    def condition(self) -> str:
        """`requires` in words: `--beta above 0`, or `--loss_fn dppo_tv or dppo_kl`."""
        other, *values = self.requires.split()
        if not values:
            return join_choices(f"--{name}" for name in other.split("|"))
        return f"--{other} {join_choices(values).replace('>', 'above ')}"

    @property
    def meaning(self) -> str:
        """The help with the flag that this one is read with."""
        return f"{self.help}; read only with {self.condition}" if self.requires else self.help

    @property
    def metavar(self) -> str:
        """The value in usage lines: `INT`, `true|false`, `dpo|simpo`, `WORD ...`."""
        if self.choices:
            choices = (*self.choices, OWN) if self.takes_own else self.choices
            return "|".join(choices) + " ..." * (self.kind is list)
        return KINDS[self.kind, self.item_kind][0]

    @property
    def accepted(self) -> str:
        """The values it takes, for error messages."""
        if self.choices:
            takes_several = self.kind is list and not self.or_one
            what = f"{'any' if takes_several else 'one'} of {', '.join(self.choices)}"
            if self.takes_own:
                what += ", or a function of your own as FILE.py:function or module:function"
        else:
            what = KINDS[self.kind, self.item_kind][1]
        return f"{what}, or none" if self.optional else what

    def limit_problem(self, number: float) -> str | None:
        """The end of an error message, `must be at least 0 and below 1`.

        None if the number is within the limits.
        """
        limits = (
            ("at least", self.minimum, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.maximum, operator.le),
            ("below", self.below, operator.lt),
        )
        if all(limit is None or holds(number, limit) for _, limit, holds in limits):
            return None
        words = [f"{word} {limit}" for word, limit, _ in limits if limit is not None]
        return f"must be {' and '.join(words)}{self.note}"

    def parse_value(self, words: Sequence[str]) -> Any:
        """The value that `words` spell: exactly one word, unless the flag is a list.

        Raises:
            InputError: what is accepted and what was given; the caller adds which flag and where.
        """
        if not all(map(_is_text, words)):
            raise InputError(
                "holds a null byte or one that is not UTF-8; give text", kind="bad_value"
            )
        if (
            self.kind is list
            and self.default == []
            and [word.lower() for word in words] == ["none"]
        ):
            return []
        if self.kind is list and (words or not self.or_one):
            items = [self._value_of_word(word, self.item_kind) for word in words]
            return items[0] if self.or_one and len(items) == 1 else items
        if not words:
            raise InputError(
                f"needs a value: {self.accepted}", kind="bad_value", remedy=f"give {self.accepted}"
            )
        if len(words) > 1:
            raise InputError(
                f"takes one value, so {quote_word(words[1])} after {quote_word(words[0])} belongs "
                "to no flag",
                kind="stray_word",
                remedy=f"leave {quote_word(words[1])} out",
            )
        is_none = self.optional and words[0].lower() in NONE_WORDS
        return None if is_none else self._value_of_word(words[0], self.kind)

    def _value_of_word(self, word: str, kind: type) -> Any:
        value: Any
        if kind is bool:
            value = {"true": True, "false": False}.get(word.lower())
        elif kind is not str:
            value = _finite_number(kind, word)
        else:
            is_own = self.takes_own and all(word.rpartition(":"))
            value = word if not self.choices or word in self.choices or is_own else None
            value = fill_in_path(word) if self.is_path else value
        if value is None:
            raise InputError(
                f"takes {self.accepted}, not {quote_word(word)}{self._hint(word)}",
                kind="bad_value",
                remedy=f"give {self.accepted}",
            )
        return value

    def _hint(self, word: str) -> str:
        if (here := OTHER_WORDS.get(word.lower())) in self.choices:
            return f"; that is called {here} here"
        parts = word.split(",")
        if self.kind is list and len(parts) > 1 and all(part in self.choices for part in parts):
            return f"; words of a list have spaces between them: {' '.join(parts)}"
        number = _finite_number(float, word) if int in (self.kind, self.item_kind) else None
        if number is None or number != int(number):
            return ""
        if abs(number) > LARGEST_INT:
            return f" (at most {LARGEST_INT})"
        return f" (write {int(number)})"


def requirement_met(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether the `values` of flags meet a `Flag.requires`.

    `use_lora` is met by any value that is not false, empty or none, `eval_mixer_list|eval_split`
    where that holds of one of both, and `beta >0` by a number above 0. `loss_fn dppo_kl
    FILE.py:FUNCTION` is met by the word dppo_kl, and by any function of the user's own.
    """
    other, *wanted_values = condition.split()
    if not wanted_values or wanted_values == [">0"]:
        return any(bool(values[name]) for name in other.split("|"))
    value = values[other]
    words = value if isinstance(value, list) else [value]
    return any(word in wanted_values or (OWN in wanted_values and ":" in word) for word in words)


def fill_in_path(word: str) -> str:
    """The word with `~`, `$NAME` and `${NAME}` filled in, as a shell does it.

    A YAML file and a word in quotes come without a shell.

    :raises InputError: a variable that is not set, or a user who has no home.
    """
    for name in re.findall(r"\$\{?([A-Za-z_]\w*)", word):
        if name not in os.environ:
            raise InputError(
                f"names ${name}, which is not set in the environment: export {name}, or write the "
                "path out",
                kind="bad_value",
            )
    path = os.path.expanduser(os.path.expandvars(word))
    if path.startswith("~") and not os.path.lexists(path):
        user = path.partition("/")[0]
        raise InputError(
            f"begins with {user}, and there is no such user: write the path out", kind="bad_value"
        )
    return path


def spell_value(value: Any) -> str:
    """A flag's value as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return " ".join(map(str, value)) if value else "empty"
    return str(value)


def quote_word(word: str) -> str:
    """The word in quotes; a long one is cut."""
    return f"'{word}'" if len(word) <= LONGEST_SHOWN else f"'{word[:LONGEST_SHOWN]}…'"


def _is_text(word: str) -> bool:
    # Python turns bytes of the command line that are not UTF-8 into lone surrogates, which cannot
    # be printed.
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in word)


def _finite_number(kind: type, word: str) -> Any:
    """`word` as an int or float.

    None when it is not one, or is infinite, too large or not a number.
    """
    try:
        number = kind(word)
    except ValueError:
        return None
    within = abs(number) <= LARGEST_INT if kind is int else math.isfinite(number)
    return number if within else None


def list_sections(config_class: type) -> dict[str, type]:
    """The section classes of a config class by field: its own, then those of every run.

    A class whose own fields are flags, as the commands beside the runs have, is its only section,
    under "".
    """
    return _read_sections(config_class)


@cache
def _read_sections(config_class: type) -> dict[str, type]:
    if all(field.metadata for field in fields(config_class)):
        return {"": config_class}
    hints = get_type_hints(config_class)
    names = [field.name for field in fields(config_class) if is_dataclass(hints[field.name])]
    places = {name: place for place, name in enumerate(LAST_SECTIONS)}
    own_first = sorted(names, key=lambda name: places.get(name, -1))
    return {name: hints[name] for name in own_first}


def section_title(section_class: type, name: str) -> str:
    """The heading of a section's flags: its `title`, or else the name of the field that holds it.

    Example: `ParallelSection`, which is `parallel` in a config class, has the title `Sharding`.
    """
    title: str = getattr(section_class, "title", name.replace("_", " ").capitalize())
    return title


def list_flags(config_class: type) -> dict[str, Flag]:
    """Every flag of a config class by name, in the order of its sections."""
    flags: dict[str, Flag] = {}
    for section, section_class in list_sections(config_class).items():
        for name, flag in list_section_flags(section_class, section).items():
            assert name not in flags, f"flag {name} is in two sections"
            flags[name] = flag
    return flags


def list_section_flags(section_class: type, section: str = "") -> dict[str, Flag]:
    """The flags of one section class, required ones first.

    `section` is the field of a config class that holds it.
    """
    return _read_section(section_class, section)


@cache
def _read_section(section_class: type, section: str) -> dict[str, Flag]:
    hints = get_type_hints(section_class)
    requires = getattr(section_class, "section_requirement", "")
    flags = [
        _build_flag(field, hints[field.name], section, requires) for field in fields(section_class)
    ]
    return {flag.name: flag for flag in sorted(flags, key=lambda flag: not flag.required)}


def _build_flag(
    field: Field[Any],
    hint: Any,
    section: str,
    section_requirement: str,
) -> Flag:
    requires = "" if field.name == section_requirement else section_requirement
    facts: dict[str, Any] = {
        "choices": (),
        "requires": requires,
        **_facts_of_type(hint),
        **field.metadata,
    }
    if callable(facts["requires"]):
        facts["requires"] = facts["requires"](field.name)
    facts["choices"] = tuple(facts["choices"])
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    # A default of None lets the section compute the value itself.
    facts["optional"] |= default is None
    required = default is MISSING
    return Flag(
        name=field.name,
        section=section,
        required=required,
        default=None if required else default,
        **facts,
    )


def _facts_of_type(hint: Any) -> dict[str, Any]:
    """What a field's annotation says of its flag; it is limited to what sections.py allows."""
    optional = or_one = False
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        optional = len(members) < len(get_args(hint))
        or_one = members == [str, list[str]]
        assert len(members) == 1 or or_one, f"a flag has one type, or one type and None: {hint}"
        hint = members[-1]
    if get_origin(hint) is Literal:
        return {
            "kind": str,
            "choices": get_args(hint),
            "optional": optional,
        }
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        assert item in (str, int, float), (
            f"a list flag is list[str], list[int] or list[float]: {hint}"
        )
        return {
            "kind": list,
            "item_kind": item,
            "optional": optional,
            "or_one": or_one,
        }
    assert hint in (str, int, float, bool), (
        f"a flag's type is str, int, float, bool, Literal or a list: {hint}"
    )
    return {"kind": hint, "optional": optional}
