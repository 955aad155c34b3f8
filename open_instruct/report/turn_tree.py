"""An episode's turns as one text, in which an agent's branches are a tree."""

import textwrap
from collections.abc import Mapping, Sequence

from open_instruct.core.episodes import BRANCH_ROLE

INDENT = "│  "  # of each branch that a turn is deeper than the first


def write_turns(turns: Sequence[Mapping[str, str]], *, first: int = 0) -> list[str]:
    """A text for each turn from the `first` on, set off by how deep in the tree it stands.

    A branch stands one deeper than the reply that it goes on from; a history of its own stands at
    the edge.
    """
    depth = 0
    depths: list[int] = []  # by reply
    texts: list[str] = []
    for turn in turns:
        role = turn["role"]
        if role == BRANCH_ROLE:
            after = turn.get("after", "")
            depth = depths[int(after) - 1] + 1 if after else 0
        elif role == "assistant":
            depths.append(depth)
        text = f"[{role}]\n{turn['content']}"
        texts.append(textwrap.indent(text, INDENT * depth, lambda line: True))
    return texts[first:]
