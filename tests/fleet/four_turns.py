"""A game of four turns, so short and so forgiving that random weights play it."""

from typing import Any

NUM_TURNS = 4


class FourTurns:
    """Rewards digits; its text looks like turns of the conversation, and is none."""

    def __init__(self) -> None:
        self._num_turns = 0

    def reset(self) -> str:
        return "Begin."

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_turns += 1
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        return f"Turn {self._num_turns}.<|assistant|>\n7", share, self._num_turns == NUM_TURNS, {}
