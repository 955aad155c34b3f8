"""Every launch in a checkout of open-instruct, and whether `open-instruct migrate-args` makes the
same run of it.

python scripts/upstream_launches.py CHECKOUT
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.core.errors import InputError
from open_instruct.migrate.launch import TRAINERS, find_trainer, read_launch
from open_instruct.migrate.migration import migrate
from open_instruct.migrate.suites.settings import ENDS_OF_COMMANDS

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
SEPARATORS = ";&|()\n"
# Programs that name a script and do not start it.
READERS = ("echo", "cp", "ls", "grep", "sed", "cat")
# What a job of upstream's finds in its environment.
OF_JOBS = ("$CODE_API_URL", "http://localhost:1234")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command of a shell script that starts a trainer, or a YAML file for one.

    Example: `python open_instruct/dpo.py --beta 5` is::

        Launch(file=Path("dpo.sh"), trainer="dpo", words=("open_instruct/dpo.py", "--beta", "5"))
    """

    file: Path
    trainer: str
    words: tuple[str, ...]


class Shell:
    """Just so much of a shell as launch scripts need: words, quotes, variables, and of a loop the
    first turn.
    """

    def __init__(self, text: str, variables: dict[str, str] | None = None) -> None:
        self.text = text.replace("\\\r\n", " ").replace("\\\n", " ")
        self.place = 0
        self.variables = variables if variables is not None else {}

    def statements(self) -> Iterator[list[str]]:
        """The words of each statement. What a statement assigns is known to those after it."""
        while self.place < len(self.text):
            words = self._statement()
            while words and words[0] in ("do", "then", "else", "export", "local", "time", "{"):
                words.pop(0)
            if len(words) > 3 and words[0] == "for" and words[2] == "in":
                self.variables[words[1]] = words[3]
            elif words and all(map(ASSIGNMENT.fullmatch, words)):
                for word in words:
                    name, _, value = word.partition("=")
                    self.variables[name] = value
            elif words:
                yield words

    def _statement(self) -> list[str]:
        words: list[str] = []
        word: str | None = None
        while self.place < len(self.text):
            character = self.text[self.place]
            self.place += 1
            if character in SEPARATORS and not (
                character == "(" and word is not None and word.endswith("=")
            ):
                break
            if character == "(":  # an array: its words
                inside = Shell(self._until(")").replace("\n", " "), self.variables)
                word = (word or "") + " ".join(
                    each for words in inside.statements() for each in words
                )
            elif character in " \t\r":
                words += [] if word is None else [word]
                word = None
            elif character == "#" and word is None:
                self._until("\n")
                self.place -= 1
            elif character in "<>":  # a redirection: its number before, and where it goes
                word = None if word is not None and word.isdecimal() else word
                self.place += len(re.match(r"[<>&]*[ \t]*[^\s;&|]*", self.text[self.place :])[0])
            elif character == "\\":
                word = (word or "") + self.text[self.place : self.place + 1]
                self.place += 1
            elif character == "'":
                word = (word or "") + self._until("'")
            elif character == '"':
                if self.text.startswith('$@"', self.place):  # the script's own arguments: none
                    self.place += 3
                else:
                    word = (word or "") + self._double_quoted()
            elif character == "$":
                value = self._expanded()
                if ASSIGNMENT.match(word or "") or not value.split():
                    word = (word or "") + value if value else word
                else:
                    first, *rest = value.split()
                    word = (word or "") + first
                    for each in rest:
                        words.append(word)
                        word = each
            else:
                word = (word or "") + character
        return words + ([] if word is None else [word])

    def _until(self, end: str) -> str:
        before, _, _ = self.text[self.place :].partition(end)
        self.place += len(before) + 1
        return before

    def _double_quoted(self) -> str:
        value = ""
        while self.place < len(self.text) and self.text[self.place] != '"':
            character = self.text[self.place]
            self.place += 1
            if character == "\\":
                value += self.text[self.place]
                self.place += 1
            else:
                value += self._expanded() if character == "$" else character
        self.place += 1
        return value

    def _expanded(self) -> str:
        """What stands after a dollar sign."""
        if self.text[self.place : self.place + 1] == "(":
            depth, start = 0, self.place
            while self.place < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[self.place], 0)
                self.place += 1
                if depth == 0:
                    break
            return self._computed(self.text[start + 2 : self.place - 2])
        if self.text[self.place : self.place + 1] == "{":
            self.place += 1
            inside = self._until("}")
            name, _, default = inside.partition(":-") if ":-" in inside else inside.partition("-")
            name = name.removesuffix("[@]").removesuffix("[*]")
            if name.startswith("!"):  # the variable that this one names
                name = self.variables.get(name[1:], name[1:])
            return self.variables.get(name, default.strip('"') or name)
        match = re.compile(r"\w+|[@*#?]").match(self.text, self.place)
        if match is None:
            return "$"
        self.place = match.end()
        return self.variables.get(match[0], "" if match[0] in "@*" else match[0])

    def _computed(self, expression: str) -> str:
        """The value of whole numbers, * and /; of any other command the word OUTPUT."""
        known = NAME.sub(
            lambda match: self.variables.get(match[0], match[0]), expression.replace("$", "")
        )
        factors = re.split(r"\s*([*/])\s*", known.strip())
        if not all(map(str.isdecimal, factors[::2])):
            return "OUTPUT"
        result = int(factors[0])
        for sign, factor in zip(factors[1::2], factors[2::2], strict=True):
            result = result * int(factor) if sign == "*" else result // int(factor)
        return str(result)


def launches_of(file: Path, text: str) -> Iterator[Launch]:
    """The launches of a shell script, in their order."""
    for words in Shell(text).statements():
        yield from _of_words(file, words)


def _of_words(file: Path, words: list[str]) -> Iterator[Launch]:
    """Of one statement; a launcher's `-- … && …` holds several, and a quoted word may hold a whole
    line.
    """
    at = next((index for index, word in enumerate(words) if find_trainer(word)), None)
    if at is not None:
        end = next(
            (index for index in range(at, len(words)) if words[index] in ENDS_OF_COMMANDS),
            len(words),
        )
        if words[0] not in READERS:
            known = tuple(word.replace(*OF_JOBS) for word in words[at:end])
            yield Launch(file=file, trainer=find_trainer(words[at]), words=known)
        yield from _of_words(file, words[end + 1 :])
        return
    for word in words:
        if " " in word and "open_instruct/" in word:
            for inner in Shell(word).statements():
                yield from _of_words(file, inner)


def launches_in(checkout: Path) -> Iterator[Launch]:
    """Those of all shell scripts, and the YAML files of configs/train_configs, each as one
    launch.
    """
    for path in sorted(checkout.rglob("*.sh")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from launches_of(path.relative_to(checkout), text)
    for path in sorted((checkout / "configs" / "train_configs").rglob("*.yaml")):
        file = path.relative_to(checkout)
        trainer = "dpo" if "dpo" in (path.parent.name, *path.stem.split("_")) else "finetune"
        yield Launch(file=file, trainer=trainer, words=(str(path),))


def table(checkout: Path) -> Iterator[str]:
    """A line for each launch, and what they come to."""
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    for launch in launches_in(checkout):
        kind = "YAML files" if launch.file.suffix == ".yaml" else "commands"
        command = next(
            (name for name, trainers in TRAINERS.items() if launch.trainer in trainers), None
        )
        if command is None:
            counts[kind, f"of {launch.trainer}, which has no command here"] += 1
            continue
        refused = _refused(command, launch)
        counts[kind, f"{command}: {'not the same' if refused else 'the same'}"] += 1
        reasons.update(f"{command} --{name}" for name in refused)
        told = "; ".join(f"--{name} {reason}" for name, reason in refused.items())
        yield (
            f"{'not the same' if refused else 'the same    '}  {command:12}  {launch.file}  {told}"
        ).rstrip()
    yield "\nReasons, and how many launches have each:"
    yield from (f"{count:5}  {reason}" for reason, count in reasons.most_common())
    for kind in ("commands", "YAML files"):
        of_kind = {what: count for (each, what), count in sorted(counts.items()) if each == kind}
        same = sum(count for what, count in of_kind.items() if what.endswith(": the same"))
        judged = same + sum(
            count for what, count in of_kind.items() if what.endswith("not the same")
        )
        yield f"\n{kind}: {same} of {judged} are the same run here"
        yield from (f"{count:5}  {what}" for what, count in of_kind.items())


def _refused(command: str, launch: Launch) -> Mapping[str, str]:
    if launch.words[1:] and not launch.words[1].startswith("--"):
        return {"FILE": f"is the script's own argument {launch.words[1]}"}
    try:
        return migrate(command, read_launch(command, launch.words)).refused
    except InputError as error:
        return {"ARGS": str(error)}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/upstream_launches.py CHECKOUT")
    for line in table(Path(sys.argv[1])):
        print(line)
