"""The flags of an upstream launch with their values, and the results of translating them one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field


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
        """Set our `flag` to these words, for upstream's `source`. A value of the launch goes before a default."""
        if flag in self.ours and source not in self.given and self.ours[flag][1] in self.given:
            return
        if flag in self.ours and (before := self.ours[flag][1]) in self.given and before != source:
            self.dropped[before] = f"says what --{source} says, which is taken"
        self.ours[flag] = (list(words), source)
