"""Parse a command line, `[FILE.yaml] --flag value ...`, into a config.

Both spell values in the same words. Everything that is wrong is collected and reported in one
error.
"""

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import yaml

from open_instruct.config.flags import Flag, list_flags, list_sections, spell_value
from open_instruct.config.name_hints import describe_name_here, find_flag_here, suggest_nearest
from open_instruct.config.packaged import packaged_settings, settings_file
from open_instruct.config.suites.upstream_flags import Fate, translate_flag
from open_instruct.config.yaml_depth import check_depth
from open_instruct.core.errors import InputError, Kind, Problem
from open_instruct.core.files import read_user_file
from open_instruct.core.tables import LOADER

ConfigT = TypeVar("ConfigT")

YAML_SUFFIXES = (".yaml", ".yml")
COMMAND = "command"  # the key under which config.yaml names who wrote it
MAX_YAML_BYTES = 2**20
NESTED = "\0"  # no word of a command line is that
YAML_NULL = "tag:yaml.org,2002:null"


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    assumed: Mapping[str, Any] | None = None,
    unneeded: list[str] | None = None,
    passed_over: list[str] | None = None,
) -> ConfigT:
    """The config that `argv` (without the program's name) describes.

    The first word may name a YAML file, a flat mapping of flag names; flags on the command line
    replace its values, and those of the flags whose place they take (`Flag.replaces`). Dashes in a
    flag's name count as underscores. Booleans are spelled `--flag`,
    `--flag true|false` or `--no_flag`; a list takes every word up to the next flag; `none` unsets
    a flag that may be unset. Upstream's flags are translated by `upstream_flags`.

    Args:
        assumed: values for flags that must be given and may be left out here.
        unneeded: receives a flag that a run does not need, with the reason; where it is None, such
            a flag is refused.
        passed_over: receives what this version cannot read in the file of another one: keys that
            are no flags, and values that a flag no longer takes, where it is one that a resumed run
            may change. None: they are refused.

    Raises:
        InputError: listing everything that is wrong (unknown, repeated and missing flags, values
            of a wrong type, a file that cannot be read).
    """
    reader = _Reader(list_flags(config_class), unneeded=unneeded, passed_over=passed_over)
    values = {name: value for name, value in (assumed or {}).items() if name in reader.flags}
    values |= reader.read(argv)
    given_names = values.keys() | reader.renamed
    missing = [
        f"--{flag.name}"
        for flag in reader.flags.values()
        if flag.required and flag.name not in given_names
    ]
    if missing and not reader.has_sections:
        text = f"missing: {', '.join(missing)} (as flags, or in a YAML file)"
        reader.problems.append(
            Problem(text, kind="missing_flag", remedy=f"give {', '.join(missing)}")
        )
    if reader.problems:
        raise InputError("\n".join(reader.problems), problems=reader.problems)
    by_section: dict[str, dict[str, Any]] = {section: {} for section in list_sections(config_class)}
    for name, value in values.items():
        by_section[reader.flags[name].section][name] = value
    sections = {
        section: made_of(**by_section[section])
        for section, made_of in list_sections(config_class).items()
    }
    return sections[""] if "" in sections else config_class(**sections)


def list_given_flags(config_class: type, argv: Sequence[str]) -> KeysView[str]:
    """The names of the flags that `argv` sets, be it to the default, in its order.

    `parse` must accept `argv`.
    """
    return _Reader(list_flags(config_class), unneeded=[]).read(argv).keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenFlag:
    """A flag as it was given, on the command line or in a file.

    Example: line 3 of run.yaml, `max-seq-length: 64`, is::

        _GivenFlag(name="max_seq_length", spelling="max-seq-length", words=["64"], where="line 3: ")
    """

    name: str
    spelling: str
    words: Sequence[str]
    where: str = ""  # empty on the command line
    is_null: bool = False  # YAML's null, whose words are ["none"]
    is_section: bool = False  # its value in the file is a mapping

    @property
    def origin(self) -> str:
        return self.where + self.spelling


class _Reader:
    """Reads the flags of one command. What is wrong is listed in `problems`, and the value is then
    None.

    Attributes:
        renamed: flags that were given by the name that another suite has for them.
        has_sections: a file has sections, whose flags are not read.
    """

    def __init__(
        self,
        flags: Mapping[str, Flag],
        *,
        unneeded: list[str] | None,
        passed_over: list[str] | None = None,
    ) -> None:
        self.flags = flags
        self.unneeded = unneeded
        self.passed_over = passed_over
        self.problems: list[Problem] = []
        self.renamed: set[str] = set()
        self.has_sections = False

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of the file that the first word may name, replaced by the flags after it."""
        words = list(argv)
        values: dict[str, Any] = {}
        if words and not words[0].startswith("-"):
            words[0] = settings_file(words[0])
        if words and words[0].lower().endswith(YAML_SUFFIXES) and not words[0].startswith("-"):
            values = self._read_values(self._read_file(words.pop(0)))
        command_line = self._read_values(self._read_command_line(words))
        self._leave_out_replaced(values, command_line)
        return values | command_line

    def _leave_out_replaced(self, values: dict[str, Any], command_line: Mapping[str, Any]) -> None:
        """Take out of the `values` of a file what a typed flag takes the place of, and name it
        where it said more.
        """
        for name, value in command_line.items():
            flag = self.flags[name]
            if value == flag.default:
                continue
            for other in (
                each
                for each in flag.replaces.split()
                if each in values and each not in command_line
            ):
                if values.pop(other) != self.flags[other].default and self.unneeded is not None:
                    self.unneeded.append(f"{other} of the file (--{name} takes its place)")

    def _read_command_line(self, words: Sequence[str]) -> Iterator[_GivenFlag]:
        for spelling, its_words in group_words(words, self.problems):
            name = _parse_name(spelling.removeprefix("--"))
            positive = self.flags.get(name.removeprefix("no_"))
            if name not in self.flags and positive is not None and positive.kind is bool:
                name = positive.name
                if its_words:
                    text = f"{spelling} takes no value; leave '{its_words[0]}' out, or use --{name}"
                    self.problems.append(Problem(text, kind="bad_value", flag=name))
                its_words = ["false"]
            elif name in self.flags and self.flags[name].kind is bool:
                its_words = its_words or ["true"]
            yield _GivenFlag(name=name, spelling=spelling, words=its_words)

    def _read_file(self, path: str) -> Iterator[_GivenFlag]:
        """Scalars are taken as they are written, so that `5e-7` (a string to YAML 1.1) is a number
        here too.
        """
        for key, value in read_yaml_nodes(path):
            where = f"{path} line {key.start_mark.line + 1}: "
            if not isinstance(key, yaml.ScalarNode):
                text = f"{where}a flag's name is one word, not a list or mapping"
                self.problems.append(Problem(text, kind="unreadable_file"))
            elif key.value != COMMAND:
                yield _GivenFlag(
                    name=_parse_name(key.value),
                    spelling=key.value,
                    words=list_yaml_words(value),
                    where=where,
                    is_null=value.tag == YAML_NULL,
                    is_section=isinstance(value, yaml.MappingNode),
                )

    def _read_values(self, given_flags: Iterable[_GivenFlag]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, _GivenFlag] = {}
        translated: set[str] = set()  # flags of ours that a flag of upstream's sets
        for given_flag in given_flags:
            if self._passes_over(given_flag):
                continue
            fate = translate_flag(given_flag.name, given_flag.words, self.flags)
            name = given_flag.name
            if fate is not None:
                if fate.ours is None:
                    self._leave_out(given_flag, fate)
                    continue
                name = fate.ours
                translated.add(name)
                given_flag = replace(given_flag, words=fate.words, is_null=False)
            if name not in self.flags:
                self._refuse_unknown(given_flag)
                continue
            value = self._value(self.flags[name], given_flag)
            # Several flags of upstream's may say the same.
            if name in values and (name not in translated or values[name] != value):
                self.problems.append(
                    Problem(
                        _describe_repetition(name, first[name], given_flag),
                        kind="repeated_flag",
                        flag=name,
                    )
                )
            values[name] = value
            first[name] = given_flag
        return values

    def _value(self, flag: Flag, given_flag: _GivenFlag) -> Any:
        if NESTED in given_flag.words:
            self._add(
                given_flag,
                f"takes {flag.accepted}, not a list of lists or mappings",
                kind="bad_value",
            )
            return None
        try:
            return flag.parse_value(
                [] if given_flag.is_null and not flag.optional else given_flag.words
            )
        except InputError as error:
            self._add(given_flag, str(error), kind=error.kind, flag=flag.name, remedy=error.remedy)
            return None

    def _passes_over(self, given_flag: _GivenFlag) -> bool:
        """Whether a line of a file is of another version and may be left out; notes it if so."""
        if self.passed_over is None or not given_flag.where:
            return False
        line = f"{given_flag.spelling}: {' '.join(given_flag.words)}"
        flag = self.flags.get(given_flag.name)
        if flag is None:
            self.passed_over.append(line)
            return True
        before = len(self.problems)
        self._value(flag, given_flag)
        is_unreadable = len(self.problems) > before and flag.resume == "free"
        del self.problems[before:]
        if is_unreadable:
            self.passed_over.append(f"{line} (its default instead, {spell_value(flag.default)})")
        return is_unreadable

    def _refuse_unknown(self, given_flag: _GivenFlag) -> None:
        is_in_file = bool(given_flag.where)
        names = set(self.flags)
        if not is_in_file:
            names |= {f"no_{flag.name}" for flag in self.flags.values() if flag.kind is bool}
        prefix = "" if is_in_file else "--"
        nearest_flag = suggest_nearest(given_flag.name, sorted(names), prefix=prefix)
        hint = describe_name_here(given_flag.name, names, prefix) or f"is not a flag{nearest_flag}"
        if given_flag.is_section:
            hint = (
                "is a section, and settings are flat here: write each of its flags on a line of "
                "its own"
            )
            self.has_sections = True
        elif ours := find_flag_here(given_flag.name, names):
            self.renamed.add(ours)
        self._add(given_flag, hint, kind="unknown_flag")

    def _leave_out(self, given_flag: _GivenFlag, fate: Fate) -> None:
        """A flag of upstream's that has no counterpart here is a problem, or not needed."""
        if fate.refused is not None:
            self._add(given_flag, fate.refused, kind="foreign_flag")
        elif self.unneeded is None:
            self._add(
                given_flag, f"has no use here: {fate.unneeded}; leave it out", kind="foreign_flag"
            )
        else:
            self.unneeded.append(f"{given_flag.origin} ({fate.unneeded})")

    def _add(
        self,
        given_flag: _GivenFlag,
        reason: str,
        *,
        kind: Kind,
        flag: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Note what is wrong with a flag, which is shown as the user spelled it, and where."""
        text = f"{given_flag.origin} {reason}"
        self.problems.append(Problem(text, kind=kind, flag=flag or given_flag.name, remedy=remedy))


def _describe_repetition(name: str, first: _GivenFlag, second: _GivenFlag) -> str:
    """The error message where two words set one flag of ours."""
    if _parse_name(first.spelling) == _parse_name(second.spelling):
        return f"{second.origin} is given twice; keep one"
    return (
        f"{second.where}{first.spelling} and {second.spelling} both say what --{name} is here; "
        "keep one"
    )


def group_words(words: Sequence[str], problems: list[Problem]) -> list[tuple[str, list[str]]]:
    """Each `--flag` with the words up to the next one; in `--flag=value` the value comes first."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            spelling, equals, value = word.partition("=")
            groups.append((spelling, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        elif word.lower().endswith(YAML_SUFFIXES):
            text = f"'{word}': a YAML file can only be the first word, and there can be only one"
            problems.append(Problem(text, kind="stray_word"))
        else:
            hint = suggest_nearest(word, packaged_settings())
            text = f"'{word}': expected a flag (--name), or a YAML file as the first word{hint}"
            problems.append(Problem(text, kind="stray_word"))
    return groups


def read_yaml_nodes(path: str) -> list[tuple[Any, Any]]:
    """Keys and values of a flat YAML mapping, as they stand there.

    Raises:
        InputError: the file cannot be read, or is no such mapping.
    """
    text = read_user_file(path, where=path, most=MAX_YAML_BYTES)
    try:
        check_depth(text)
        root = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(
            f"{path}{line}: not valid YAML: {error.problem or error.context}",
            kind="unreadable_file",
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {error}", kind="unreadable_file") from None
    except RecursionError:
        raise InputError(
            f"{path}: lists or mappings nested too deep; give lines of 'flag: value'",
            kind="unreadable_file",
        ) from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path}: expected lines of 'flag: value'", kind="unreadable_file")
    return [] if root is None else root.value


def list_yaml_words(node: Any) -> list[str]:
    """A YAML value as words of a command line.

    A mapping gives keys and values in turn, and what is nested NESTED.
    """
    if isinstance(node, yaml.ScalarNode):
        return ["none" if node.tag == YAML_NULL else node.value]
    items = node.value
    if isinstance(node, yaml.MappingNode):
        items = list(chain.from_iterable(node.value))
    return [item.value if isinstance(item, yaml.ScalarNode) else NESTED for item in items]


def _parse_name(spelling: str) -> str:
    """Our name of a flag, from the user's spelling."""
    return spelling.replace("-", "_")
