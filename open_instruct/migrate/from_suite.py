"""`open-instruct migrate-args --from SUITE`: another suite's files and flags in our flags."""

import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from open_instruct.config.flags import spell_value
from open_instruct.config.help import asks_for_help
from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.core.text import join_choices, open_templates
from open_instruct.migrate.launch import ALL_TRAINERS
from open_instruct.migrate.suites import axolotl, llamafactory, olmo_core, openrlhf, trl, verl
from open_instruct.migrate.suites.settings import Settings
from open_instruct.migrate.suites.tables import find_suite_name, find_table, find_trainers
from open_instruct.migrate.translation import Translation, translate
from open_instruct.migrate.yaml_words import write_yaml_lines

READERS: dict[str, Callable[[list[str]], Settings]] = {
    "trl": trl.read_settings,
    "verl": verl.read_settings,
    "openrlhf": openrlhf.read_settings,
    "axolotl": axolotl.read_settings,
    "llamafactory": llamafactory.read_settings,
    "olmo-core": olmo_core.read_settings,
}
OPEN_INSTRUCT = "open-instruct"
SWITCHES = ("--json", "--yaml")
NUMBERS = ("--num_gpus", "--num_rows")
WIDTH = 110


@dataclass(slots=True, kw_only=True)
class Request:
    """The command's words, parsed: our options, and in `launch` the words of the suite."""

    suite: str
    trainer: str = ""
    switches: set[str] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    launch: list[str] = field(default_factory=list)
    asks_for_help: bool = False


def migrate_launch(request: Request) -> int:
    """Print the translation of a launch; returns the exit code."""
    suite = request.suite
    settings = READERS[suite](request.launch)
    trainers = find_trainers(suite)
    trainer = request.trainer or settings.trainer
    if trainer not in trainers:
        name = find_suite_name(suite)
        problem = f"'{trainer}' is no trainer of {name} that is known here"
        if not trainer:
            problem = f"the launch does not say which trainer of {name} it is for"
        remedy = f"write migrate-args --from {suite} TRAINER ..., with {join_choices(trainers)}"
        raise InputError(f"{problem}: {remedy}", kind="stray_word", remedy=remedy)
    numbers = dict(request.numbers)
    if settings.num_gpus is not None:
        numbers.setdefault("num_gpus", settings.num_gpus)
    translation = translate(find_table(suite, trainer), settings, numbers)
    if "--json" in request.switches:
        print(json.dumps(asdict(translation), indent=2))
    elif "--yaml" in request.switches or _is_yaml_file(request.launch):
        print(_write_yaml(translation))
    else:
        print(_write_command(translation))
    return 0 if translation.is_whole else EXIT_INPUT


def read_request(words: Sequence[str]) -> Request:
    """Parse the words after `migrate-args`: our options, then the suite's words.

    :raises InputError: the suite is not one that is known, or a number is none.
    """
    words_left: list[str] = []
    for word in words:
        words_left += word.split("=", 1) if word.startswith("--from=") else [word]
    request = Request(suite="")
    while words_left:
        word = words_left.pop(0)
        if word == "--":
            request.launch = words_left
            break
        if asks_for_help([word]):
            request.asks_for_help = True
            return request
        if word in SWITCHES:
            request.switches.add(word)
        elif word == "--from":
            request.suite = _find_suite(_take_first(words_left))
        elif word in NUMBERS:
            number = _parse_whole_number(word, _take_first(words_left))
            request.numbers[word.removeprefix("--")] = number
        elif _names_a_trainer(word, request):
            request.trainer = word
        else:
            request.launch = [word for word in (word, *words_left) if word not in SWITCHES]
            request.switches |= {word for word in words_left if word in SWITCHES}
            break
    if not request.launch:
        remedy = f"write migrate-args --from {request.suite} FILE, or its flags"
        raise InputError(f"nothing to translate: {remedy}", kind="stray_word")
    return request


def _take_first(words: list[str]) -> str:
    """Remove and return the first of the words; "" without any."""
    return words.pop(0) if words else ""


def _names_a_trainer(word: str, request: Request) -> bool:
    if request.trainer or word.startswith("-") or Path(word).is_file():
        return False
    if request.suite in READERS and word != "prm":
        return word in find_trainers(request.suite)
    return word in ALL_TRAINERS or any(word in find_trainers(suite) for suite in READERS)


def _find_suite(word: str) -> str:
    suite = word.lower().replace("_", "").replace("-", "")
    names = {name.replace("-", ""): name for name in (*READERS, OPEN_INSTRUCT)}
    if suite not in names:
        raise InputError(
            f"--from takes {join_choices(names.values())}, not "
            f"'{word}'{suggest_nearest(suite, names)}",
            kind="bad_value",
            flag="from",
        )
    return names[suite]


def _parse_whole_number(flag: str, word: str) -> float:
    if not word.isdecimal() or not int(word):
        raise InputError(f"{flag} takes a whole number above 0, not '{word}'", kind="bad_value")
    return float(word)


def _is_yaml_file(launch: Sequence[str]) -> bool:
    return len(launch) == 1 and launch[0].lower().endswith(YAML_SUFFIXES)


def _write_command(translation: Translation) -> str:
    lines = [f"open-instruct {translation.command}"]
    for name, words in translation.arguments.items():
        lines.append(f"    --{name} {shlex.join(words)}".rstrip())
    return " \\\n".join(lines) + "\n" + _write_notes(translation)


def _write_yaml(translation: Translation) -> str:
    """The text of a file of flags, with the notes in comments."""
    notes = "\n".join(f"# {line}".rstrip() for line in _write_notes(translation).splitlines())
    command = f"open-instruct {translation.command} FILE.yaml"
    head = f"# Translated from {translation.suite}. To run it: {command}"
    return "\n".join([head, *write_yaml_lines(translation.arguments), notes])


def _write_notes(translation: Translation) -> str:
    pages = open_templates(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    names = {"translation": translation, "spelled": spell_value}
    text = pages.get_template("translation.txt.jinja").render(names)
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.splitlines()))
