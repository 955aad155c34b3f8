"""Writes the table of what verifiers read into `docs/rewards.md`, from the verifiers themselves.

    python scripts/verifiers_page.py

It stands between `<!-- verifiers -->` and `<!-- end -->`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.policy_sections import RewardSection
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.verifier import Verifier

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rewards.md"
START, END = "<!-- verifiers -->\n", "<!-- end -->"
HEAD = "| `dataset` | score | reads | needs `ground_truth` | runs in |\n|---|---|---|---|---|\n"


def verifier_row(name: str, verifier: Verifier) -> str:
    text = "token ids" if verifier.reads == "token_ids" else "text"
    thoughts = "with its thoughts" if verifier.sees_thinking else "behind its thoughts"
    cells = (
        f"`{name}`",
        "0 to 1" if verifier.is_bounded else "any number",
        "the whole row" if verifier.reads_row else f"{text}, {thoughts}",
        "yes" if verifier.needs_ground_truth else "no",
        "a process of its own" if verifier.isolated else "the driver",
    )
    return f"| {' | '.join(cells)} |\n"


def verifiers_table() -> str:
    verifiers = known_verifiers(RewardSection())
    return HEAD + "".join(verifier_row(name, each) for name, each in sorted(verifiers.items()))


def page(text: str) -> str:
    """The page with its table as it is now."""
    before, _, rest = text.partition(START)
    return before + START + verifiers_table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
