"""`[FILE.yaml] --flag value ...` into a config instance.

Both spell values in the same words. Everything that is wrong is collected and reported in one error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, KeysView, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import yaml

from open_instruct.config.flags import Flag, flags_of, sections_of
from open_instruct.config.suites.other_suites import called_here
from open_instruct.config.suites.upstream_flags import Fate, taken
from open_instruct.errors import InputError
from open_instruct.whole_file import read_asked

ConfigT = TypeVar("ConfigT")
Flags: TypeAlias = Mapping[str, Flag]
Told: TypeAlias = list[str] | None  # None: what it would list is a problem

YAML_SUFFIXES = (".yaml", ".yml")
COMMAND = "command"  # the key under which config.yaml names who wrote it
MAX_YAML_BYTES = 2**20
YAML_NULL = "tag:yaml.org,2002:null"


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    assumed: Mapping[str, Any] | None = None,
    unneeded: list[str] | None = None,
    unknown: list[str] | None = None,
) -> ConfigT:
    """The config that `argv` (without the program's name) describes.

    The first word may name a YAML file, a flat mapping of flag names; flags on the command line
    replace its values. Dashes in a flag's name count as underscores. Booleans are spelled `--flag`,
    `--flag true|false` or `--no_flag`; a list takes every word up to the next flag; `none` unsets
    a flag that may be unset. `assumed` has values for flags that must be given and may be left out here.
    Upstream's flags are translated by `upstream_flags`. A flag that a run does not need is left out and listed in
    `unneeded` with the reason, or refused where `unneeded` is None. In the same way `unknown` lists keys of the file
    that are no flags, such as those of a config.yaml that another version wrote.

    Raises:
        InputError: listing everything that is wrong (unknown, repeated and missing flags, values
            of a wrong type, a file that cannot be read).
    """
    flags = flags_of(config_class)
    problems: list[str] = []
    values = {name: value for name, value in (assumed or {}).items() if name in flags}
    values |= _given(argv, flags, problems, unneeded, unknown)
    missing = [f"--{flag.name}" for flag in flags.values() if flag.required and flag.name not in values]
    if missing:
        problems.append(f"missing: {', '.join(missing)} (as flags, or in a YAML file)")
    if problems:
        raise InputError("\n".join(problems))
    sections = {
        section: section_class(**{name: value for name, value in values.items() if flags[name].section == section})
        for section, section_class in sections_of(config_class).items()
    }
    return config_class(**sections)


def flags_given(config_class: type, argv: Sequence[str]) -> KeysView[str]:
    """The names of the flags that `argv` sets, be it to the default, in its order; `parse` must accept `argv`."""
    return _given(argv, flags_of(config_class), [], [], None).keys()


def _given(argv: Sequence[str], flags: Flags, problems: list[str], unneeded: Told, unknown: Told) -> dict[str, Any]:
    """The values of the file that the first word may name, and of the flags after it, which replace them."""
    values: dict[str, Any] = {}
    words = list(argv)
    if words and words[0].lower().endswith(YAML_SUFFIXES) and not words[0].startswith("-"):
        values.update(_read_yaml(words.pop(0), flags, problems, unneeded, unknown))
    return values | _read_command_line(words, flags, problems, unneeded)


# The command line


def _read_command_line(words: Sequence[str], flags: Flags, problems: list[str], unneeded: Told) -> dict[str, Any]:
    """The value of every flag in `words`. A value that is wrong is None, and reported in `problems`."""
    values: dict[str, Any] = {}
    theirs: set[str] = set()  # flags of ours that two flags of upstream's set
    spellings: dict[str, str] = {}
    for spelling, given in groups_of(words, problems):
        name = _name_of(spelling.removeprefix("--"))
        if (fate := taken(name, given, flags)) is not None:
            if fate.ours is None:
                _tell(fate, spelling, problems, unneeded)
                continue
            name, given = fate.ours, list(fate.words)
        negated = flags.get(name.removeprefix("no_"))
        if name not in flags and name.startswith("no_") and negated is not None and negated.kind is bool:
            name = negated.name
            if given:
                problems.append(f"{spelling} takes no value, not '{given[0]}'; or write --{name} true|false")
            given = ["false"]
        if name not in flags:
            negations = [f"no_{flag.name}" for flag in flags.values() if flag.kind is bool]
            problems.append(f"{spelling} {_unknown(name, [*flags, *negations], prefix='--')}")
            continue
        if flags[name].kind is bool and not given:
            given = ["true"]
        value = _value(flags[name], given, spelling, problems)
        theirs |= {name} if fate is not None else set()
        if name in values and (name not in theirs or values[name] != value):
            problems.append(_twice(name, spellings[name], spelling))
        values[name], spellings[name] = value, spelling
    return values


def _twice(name: str, first: str, second: str, where: str = "") -> str:
    """The error message where two words set one flag of ours; they may be different flags of upstream's."""
    if _name_of(first) == _name_of(second):
        return f"{second} is given twice{where}; keep one"
    return f"{first} and {second} both say what --{name} is here, and are given{where}; keep one"


def groups_of(words: Sequence[str], problems: list[str]) -> list[tuple[str, list[str]]]:
    """Each `--flag` with the words up to the next one; in `--flag=value` the value comes first."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            spelling, equals, value = word.partition("=")
            groups.append((spelling, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        elif word.lower().endswith(YAML_SUFFIXES):
            problems.append(f"'{word}': a YAML file can only be the first word, and there can be only one")
        else:
            problems.append(f"'{word}': expected a flag (--name), or a YAML file as the first word")
    return groups


def _value(flag: Flag, words: Sequence[str], origin: str, problems: list[str]) -> Any:
    try:
        return flag.value_of(words)
    except InputError as error:
        problems.append(f"{origin} {error}")
        return None


# YAML


def _read_yaml(path: str, flags: Flags, problems: list[str], unneeded: Told, unknown: Told) -> dict[str, Any]:
    """The values in a flat YAML mapping. A value that is wrong is None, and reported in `problems`.

    Scalars are taken as they are written, so that `5e-7` (a string to YAML 1.1) and `1.0` in a
    mixer list mean what they mean on the command line.
    """
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key_node, value_node in nodes_of(path):
        where = f"{path} line {key_node.start_mark.line + 1}:"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{where} a flag's name is one word, not {_node_kind(key_node)}")
            continue
        name, origin = _name_of(key_node.value), f"{where} {key_node.value}"
        fate = taken(name, words_of(value_node), flags)
        if fate is not None and fate.ours is None:
            _tell(fate, origin, problems, unneeded)
            continue
        name = name if fate is None or fate.ours is None else fate.ours
        if name not in flags:
            if unknown is not None:
                unknown.append(name)
            elif name != COMMAND:
                problems.append(f"{origin} {_unknown(name, flags)}")
            continue
        if name in values:
            problems.append(f"{where} {_twice(name, spellings[name], key_node.value, ' in this file')}")
        spellings[name] = key_node.value
        if fate is None:
            values[name] = _yaml_value(flags[name], value_node, origin, problems)
        else:
            values[name] = _value(flags[name], fate.words, origin, problems)
    return values


def nodes_of(path: str) -> list[tuple[Any, Any]]:
    """Keys and values of a flat YAML mapping, as they stand there.

    Raises:
        InputError: the file cannot be read, or is no such mapping.
    """
    root = _compose(path)
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path}: expected lines of 'flag: value', found {_node_kind(root)}")
    return [] if root is None else root.value


def words_of(node: Any) -> list[str]:
    """A YAML value as words of a command line; a mapping gives keys and values in turn. Deeper nesting is dropped."""
    if isinstance(node, yaml.MappingNode):
        items = [each for pair in node.value for each in pair]
    else:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    words = [item.value if isinstance(item, yaml.ScalarNode) else "" for item in items]
    return ["none"] if isinstance(node, yaml.ScalarNode) and node.tag == YAML_NULL else words


def _yaml_value(flag: Flag, node: Any, origin: str, problems: list[str]) -> Any:
    is_scalar, is_list = isinstance(node, yaml.ScalarNode), isinstance(node, yaml.SequenceNode)
    if is_scalar and node.tag == YAML_NULL:
        if flag.optional:
            return None
        problems.append(f"{origin} needs a value: {flag.accepted}")
    elif is_scalar and (flag.kind is not list or flag.or_one):
        return _value(flag, [node.value], origin, problems)
    elif is_list and flag.kind is list and all(_is_word(item) for item in node.value):
        return _value(flag, [item.value for item in node.value], origin, problems)
    else:
        items = {int: "8, 8", float: "1.0, 0.5"}.get(flag.item_kind, "rows.jsonl, 1.0")
        such_as = f", such as [{items}]" if flag.kind is list and not flag.or_one else ""
        problems.append(f"{origin} takes {flag.accepted}{such_as}, not {_node_kind(node)}")
    return None


def _is_word(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag != YAML_NULL


def _compose(path: str) -> Any:
    text = read_asked(path, where=path, most=MAX_YAML_BYTES)
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: lists or mappings nested too deep; give lines of 'flag: value'") from None


def _node_kind(node: Any) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list" if all(_is_word(item) for item in node.value) else "a list of other things"
    return f"'{node.value}'"


# Names


def _name_of(spelling: str) -> str:
    """Our name of a flag, from the user's spelling."""
    return spelling.replace("-", "_")


def _tell(fate: Fate, origin: str, problems: list[str], unneeded: list[str] | None) -> None:
    """Record a flag of upstream's that has no counterpart here, as a problem or as unneeded."""
    if fate.refused is not None:
        problems.append(f"{origin} {fate.refused}")
    elif unneeded is None:
        problems.append(f"{origin} has no use here: {fate.unneeded}; leave it out")
    else:
        unneeded.append(f"{origin} ({fate.unneeded})")


def _unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    names = sorted(set(known))
    return called_here(name, names, prefix) or f"is not a flag{nearest(name, names, prefix=prefix)}"


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean X?` with the known name closest to `name`, or an empty string."""
    known = list(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if not close and len(name) > 2:
        close = [other for other in known if name.lower() in other][:1]
    return f"; did you mean {prefix}{close[0]}?" if close else ""
