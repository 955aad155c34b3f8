"""A game of four turns, so short and so forgiving that random weights play it."""

import asyncio
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

NUM_TURNS = 4
# The driver, which plays all games, kills itself in the turn of this number, where the variable is
# set.
DIES_IN_TURN = "FOUR_TURNS_DIES_IN_TURN"
TURNS_OF_ALL = count(1)
# A file that games wait for in the middle, but for those that come before it can be there.
WAITS_FOR_FILE = "FOUR_TURNS_WAITS_FOR_FILE"
NUM_GAMES_THAT_WAIT_FOR_NOTHING = 16
GAMES_OF_ALL = count(1)


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


class FourTurnsThatWait:
    """The same game, which waits before its last turn until a file has something in it."""

    def __init__(self) -> None:
        self._game = FourTurns()
        self._waits = next(GAMES_OF_ALL) > NUM_GAMES_THAT_WAIT_FOR_NOTHING
        self._num_turns = 0

    def reset(self) -> str:
        return self._game.reset()

    async def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_turns += 1
        file = Path(os.environ[WAITS_FOR_FILE])
        while self._waits and self._num_turns == NUM_TURNS - 1 and not has_content(file):
            await asyncio.sleep(0.05)
        return self._game.step(text)


def has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
