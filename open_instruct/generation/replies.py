"""Replies of a conversation, piece by piece: what is asked of whoever makes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a reply is drawn; what is None is as the model's generation_config.json says."""

    max_new_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int | None
    end_token_ids: tuple[int, ...]


class ReplyEngine(Protocol):
    """Makes replies. It holds one model, and one conversation at a time asks it."""

    was_cut: bool
    """Whether the last reply ended at `max_new_tokens`."""

    def stream(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> Iterator[str]:
        """The text of a reply, in pieces as they come."""

    def stop(self) -> None:
        """End the reply that is being made; callable from a signal handler."""
