"""One row as a form of rows renders it, before it is tokenised, cut and stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from open_instruct.data.conversations.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """A row as pieces of text that are tokenised apart; `RowBuilder` says which are learned.

    Example: `RenderedRow(texts=("User: Hi\\nAssistant:", "Hello<eos>"))`.
    """

    texts: tuple[str, ...]
    messages: Sequence[Message] = ()
    """The conversation, of which the turns of system and user are looked for in the texts."""
    details: bytes = b""
    """Bytes that are stored beside the tokens."""
    values: tuple[float, ...] = ()
    """Numbers of the row that its loss reads."""
    content: str = ""
    """What `--eval_split` decides by; by default all columns that were read."""
    token_ids: Sequence[Sequence[int]] = ()
    """Of the pieces, where they are known: nothing is tokenised then, and the texts are empty."""

    @classmethod
    def from_token_ids(cls, pieces: Sequence[Sequence[int]]) -> Self:
        """A row whose pieces are known as ids."""
        return cls(texts=("",) * len(pieces), token_ids=pieces)


ROW_OF_OTHER_SIDE = RenderedRow(texts=())
"""The mark in place of a row of the other side of `--eval_split`."""
