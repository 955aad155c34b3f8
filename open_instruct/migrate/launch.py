"""A launch of open-instruct: its trainer, its flags, and what becomes of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from open_instruct.config.parser import YAML_SUFFIXES, groups_of, nodes_of, words_of
from open_instruct.config.suites.upstream_flags import upstream_defaults
from open_instruct.core.errors import InputError, Problem

# Of each of our commands upstream's trainers, the one first that is meant where none is named.
TRAINERS = {
    "dpo": ("dpo", "dpo_tune_cache", "dpo_tune"),
    "sft": ("finetune", "olmo_core_finetune"),
    "grpo": ("grpo_fast", "grpo", "ppo_fast"),
    "reward_model": ("reward_modeling",),
}
# The same of other suites' trainers, where open-instruct has none.
OTHER_TRAINERS = {"prm": ("trl_prm", "train_prm")}
ALL_TRAINERS = TRAINERS | OTHER_TRAINERS
# Whose defaults they have.
DEFAULTS_OF = {"dpo_tune_cache": "dpo", "dpo_tune": "dpo", "grpo_fast": "grpo"}
ENDS_OF_COMMANDS = ("&&", "||", ";", "|", "&")
SCRIPT = re.compile(r"(?:.*/)?open_instruct/(\w+)\.py")
OTHER_SCRIPTS = {
    "trl_prm": re.compile(r"(?:.*/)?scripts/prm\.py"),
    "train_prm": re.compile(r"(?:.*/)?openrlhf[./]cli[./]train_prm(?:\.py)?"),
}
# Flags by which OpenRLHF's launch is known where it names no script.
OF_OPENRLHF = {"pretrain", "placeholder_token", "input_key", "max_len"}


@dataclass(slots=True, kw_only=True)
class Sheet:
    """Flags by upstream's names, given and by default, and what became of those that are done with.

    Attributes:
        asked: words of each flag that is left, those that were given first.
        given: names of the flags that the launch gives.
        ours: of our flags the words, and upstream's flag that they come from.
        dropped, refused: the reasons, by upstream's names.
        deepspeed: words that say the same to DeepSpeed, where the launch names a stage.
    """

    trainer: str
    asked: dict[str, list[str]]
    given: frozenset[str]
    ours: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deepspeed: list[str] = field(default_factory=list)

    def word(self, name: str, default: str = "none") -> str:
        """The value of a flag of one word, in small letters."""
        return " ".join(self.asked.get(name, [default])).lower()

    def is_on(self, name: str) -> bool:
        """Whether a flag that is true or false is true."""
        return name in self.asked and self.word(name) in ("true", "")

    def number(self, name: str, default: float = 0.0) -> float:
        try:
            return float(self.word(name))
        except ValueError:
            return default

    def drop(self, why: str, *names: str) -> None:
        """Leave flags out, with the reason for those that the launch gives."""
        for name in names:
            if self.asked.pop(name, None) is not None and name in self.given:
                self.dropped[name] = why

    def refuse(self, name: str, why: str) -> None:
        self.asked.pop(name, None)
        self.refused[name] = why

    def set(self, flag: str, words: Sequence[str], source: str) -> None:
        """Set our `flag` to these words, for upstream's `source`.

        A value of the launch goes before a default.
        """
        if flag in self.ours and source not in self.given and self.ours[flag][1] in self.given:
            return
        if flag in self.ours and (before := self.ours[flag][1]) in self.given and before != source:
            self.dropped[before] = f"says what --{source} says, which is taken"
        self.ours[flag] = (list(words), source)


def read_launch(command: str, words: Sequence[str]) -> Sheet:
    """Read the words behind `migrate-args COMMAND`: flags, a YAML file, or a whole command line.

    Of the launchers before upstream's script nothing is read: they say where a run stands, and not
    what it learns.

    Raises:
        InputError: they are no flags, or the script is of another command.
    """
    trainer = ALL_TRAINERS[command][0]
    words = list(words)
    scripts = [index for index, word in enumerate(words) if script_of(word)]
    if scripts:
        trainer = script_of(words[scripts[0]])
        if trainer not in ALL_TRAINERS[command]:
            ours = next(
                (name for name, trainers in ALL_TRAINERS.items() if trainer in trainers), None
            )
            raise InputError(
                f"{words[scripts[0]]} is not what {command} is here; "
                + (
                    f"use migrate-args {ours}"
                    if ours
                    else "there is no command here that does the same"
                ),
                kind="stray_word",
            )
        words = words[scripts[0] + 1 :]
    end = next((index for index, word in enumerate(words) if word in ENDS_OF_COMMANDS), len(words))
    words = words[:end]
    asked: dict[str, list[str]] = {}
    if words and words[0].lower().endswith(YAML_SUFFIXES):
        asked |= {key.value: words_of(value) for key, value in nodes_of(words.pop(0))}
    problems: list[Problem] = []
    for spelling, its_words in groups_of(words, problems):
        asked[spelling.removeprefix("--").replace("-", "_")] = its_words
    if problems and not scripts:
        ways = f"give its flags to `open-instruct {command}`, which says what each is called here"
        other = f"no launch of allenai's open-instruct; of another trainer, {ways}"
        problems.append(Problem(other, kind="stray_word"))
    if problems:
        raise InputError("\n".join(problems), problems=problems)
    if not scripts and command == "sft" and asked.keys() & {"mixer_list", "num_epochs"}:
        trainer = "olmo_core_finetune"  # whose flags those are
    if not scripts and command == "prm" and asked.keys() & OF_OPENRLHF:
        trainer = "train_prm"
    for name in [name for name in asked if name.startswith("no_") and not asked[name]]:
        asked[name.removeprefix("no_")] = ["false"]
        del asked[name]
    given = frozenset(asked)
    defaults = upstream_defaults(DEFAULTS_OF.get(trainer, trainer))
    asked |= {name: words for name, words in defaults.items() if name not in given}
    return Sheet(trainer=trainer, asked=asked, given=given)


def script_of(word: str) -> str:
    """The trainer that a script is: `dpo` of `open_instruct/dpo.py`; "" of any other word."""
    match = SCRIPT.fullmatch(word)
    if match:
        return match[1]
    return next((name for name, script in OTHER_SCRIPTS.items() if script.fullmatch(word)), "")
