"""A launch of open-instruct: its trainer, its flags, and what becomes of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from open_instruct.config.parser import YAML_SUFFIXES, group_words, list_yaml_words, read_yaml_nodes
from open_instruct.config.suites.upstream_flags import upstream_defaults
from open_instruct.core.errors import InputError, Problem
from open_instruct.migrate.suites.settings import first_command

# Upstream's trainers by our command; the first is meant where none is named.
TRAINERS = {
    "dpo": ("dpo", "dpo_tune_cache", "dpo_tune"),
    "sft": ("finetune", "olmo_core_finetune"),
    "grpo": ("grpo_fast", "grpo", "ppo_fast"),
    "reward_model": ("reward_modeling",),
}
# The same of other suites' trainers, where open-instruct has none.
OTHER_TRAINERS = {"prm": ("trl_prm", "train_prm")}
ALL_TRAINERS = TRAINERS | OTHER_TRAINERS
# Trainers that have the defaults of another.
DEFAULTS_FROM = {
    "dpo_tune_cache": "dpo",
    "dpo_tune": "dpo",
    "grpo_fast": "grpo",
}
SCRIPT = re.compile(r"(?:.*/)?open_instruct/(\w+)\.py")
OTHER_SCRIPTS = {
    "trl_prm": re.compile(r"(?:.*/)?scripts/prm\.py"),
    "train_prm": re.compile(r"(?:.*/)?openrlhf[./]cli[./]train_prm(?:\.py)?"),
}
# Flags by which OpenRLHF's launch is known where it names no script.
OPENRLHF_FLAGS = {"pretrain", "placeholder_token", "input_key", "max_len"}


@dataclass(slots=True, kw_only=True)
class Sheet:
    """A launch on its way from upstream's flags to ours.

    Attributes:
        theirs: the words of each of upstream's flags that is left, defaults after those of the
            launch.
        launch_flags: names of the flags that the launch gives.
        ours: the words of each of our flags, and upstream's flag that they come from.
        dropped: why a flag is left out, by upstream's names.
        refused: why a flag cannot be had, by upstream's names.
        deepspeed: words that say the same to DeepSpeed, where the launch names a stage.
    """

    trainer: str
    theirs: dict[str, list[str]]
    launch_flags: frozenset[str]
    ours: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deepspeed: list[str] = field(default_factory=list)

    def word(self, name: str, default: str = "none") -> str:
        """The value of a flag of one word, in small letters."""
        return " ".join(self.theirs.get(name, [default])).lower()

    def is_on(self, name: str) -> bool:
        """Whether a flag that is true or false is true."""
        return name in self.theirs and self.word(name) in ("true", "")

    def number(self, name: str, default: float = 0.0) -> float:
        try:
            return float(self.word(name))
        except ValueError:
            return default

    def drop(self, why: str, *names: str) -> None:
        """Leave flags out, with the reason for those that the launch gives."""
        for name in names:
            if self.theirs.pop(name, None) is not None and name in self.launch_flags:
                self.dropped[name] = why

    def find_first(self, names: Sequence[str]) -> str:
        """The first of these flags that the launch gives; "" if it gives none."""
        return next((name for name in names if name in self.launch_flags), "")

    def refuse(self, name: str, why: str) -> None:
        self.theirs.pop(name, None)
        self.refused[name] = why

    def set(self, flag: str, words: Sequence[str], source: str) -> None:
        """Set our `flag` to these words, for upstream's `source`.

        A value of the launch goes before a default.
        """
        _, earlier = self.ours.get(flag, ([], ""))
        if earlier in self.launch_flags:
            if source not in self.launch_flags:
                return
            if earlier != source:
                self.dropped[earlier] = f"says what --{source} says, which is taken"
        self.ours[flag] = (list(words), source)


def read_launch(command: str, words: Sequence[str]) -> Sheet:
    """Read the words behind `migrate-args COMMAND`: flags, a YAML file, or a whole command line.

    The words of launchers before upstream's script are not read: they say where a run takes place,
    and not what it learns.

    Raises:
        InputError: they are no flags, or the script is of another command.
    """
    trainer, words = _split_at_script(command, words)
    flags: dict[str, list[str]] = {}
    words = first_command(words)
    if words and words[0].lower().endswith(YAML_SUFFIXES):
        flags |= {key.value: list_yaml_words(value) for key, value in read_yaml_nodes(words.pop(0))}
    problems: list[Problem] = []
    for spelling, its_words in group_words(words, problems):
        flags[spelling.removeprefix("--").replace("-", "_")] = its_words
    if problems and not trainer:
        ways = f"give its flags to `open-instruct {command}`, which says what each is called here"
        other = f"no launch of allenai's open-instruct; of another trainer, {ways}"
        problems.append(Problem(other, kind="stray_word"))
    if problems:
        raise InputError("\n".join(problems), problems=problems)
    trainer = trainer or _guess_trainer(command, flags)
    for name in list(flags):
        if name.startswith("no_") and not flags[name]:
            flags[name.removeprefix("no_")] = ["false"]
            del flags[name]
    launch_flags = frozenset(flags)
    for name, default in upstream_defaults(DEFAULTS_FROM.get(trainer, trainer)).items():
        flags.setdefault(name, default)
    return Sheet(trainer=trainer, theirs=flags, launch_flags=launch_flags)


def _split_at_script(command: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """The trainer whose script the words name ("" if none), and the words after the script.

    :raises InputError: the script is of another command.
    """
    for index, word in enumerate(words):
        trainer = find_trainer(word)
        if trainer in ALL_TRAINERS[command]:
            return trainer, list(words[index + 1 :])
        if trainer:
            other = find_command(trainer)
            remedy = "there is no command here that does the same"
            if other:
                remedy = f"use migrate-args {other}"
            raise InputError(f"{word} is not what {command} is here; {remedy}", kind="stray_word")
    return "", list(words)


def _guess_trainer(command: str, flags: Mapping[str, list[str]]) -> str:
    """The trainer of a launch that names no script, by its flags."""
    if command == "sft" and flags.keys() & {"mixer_list", "num_epochs"}:
        return "olmo_core_finetune"
    if command == "prm" and flags.keys() & OPENRLHF_FLAGS:
        return "train_prm"
    return ALL_TRAINERS[command][0]


def find_trainer(word: str) -> str:
    """The trainer that a script is, `dpo` of `open_instruct/dpo.py`; "" for any other word."""
    match = SCRIPT.fullmatch(word)
    if match:
        return match[1]
    for trainer, script in OTHER_SCRIPTS.items():
        if script.fullmatch(word):
            return trainer
    return ""


def find_command(trainer: str) -> str:
    """Our command for one of upstream's trainers; "" if there is none."""
    for command, trainers in ALL_TRAINERS.items():
        if trainer in trainers:
            return command
    return ""
