"""A game of four turns, so short and so forgiving that random weights play it."""

import os
import signal
from itertools import count
from typing import Any

NUM_TURNS = 4
# The driver, which plays all games, kills itself in the turn of this number, where the variable is
# set.
DIES_IN_TURN = "FOUR_TURNS_DIES_IN_TURN"
TURNS_OF_ALL = count(1)


class FourTurns:
    """Rewards digits; its text looks like turns of the conversation, and is none."""

    def __init__(self) -> None:
        self._num_turns = 0

    def reset(self) -> str:
        return "Begin."

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_turns += 1
        if str(next(TURNS_OF_ALL)) == os.environ.get(DIES_IN_TURN):
            os.kill(os.getpid(), signal.SIGKILL)
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        return f"Turn {self._num_turns}.<|assistant|>\n7", share, self._num_turns == NUM_TURNS, {}
