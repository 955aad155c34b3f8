"""Writes the tables of losses and advantages into `docs/losses.md`, from the functions that compute
them.

    python scripts/losses_page.py

Between `<!-- NAME -->` and `<!-- end -->` of the page stands what the function NAME of this file
makes.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.objectives.dpo import EXO_SMOOTHING, first_loss

PAGE = Path(__file__).resolve().parents[1] / "docs" / "losses.md"
DENOMINATORS = {"response_length": "completions × `--response_length`"}


def preference_losses() -> str:
    rows = [
        (f"`{name}`", loss.formula, linked(loss.paper)) for name, loss in PREFERENCE_LOSSES.items()
    ]
    return table(("`--loss_type`", "loss of a pair", "paper"), rows)


def preference_facts() -> str:
    rows = [
        (
            f"`{name}`",
            yes_or_no(loss.needs_reference),
            yes_or_no(loss.per_token),
            f"{loss.beta:g}",
            first(name),
            flags(loss.reads),
        )
        for name, loss in PREFERENCE_LOSSES.items()
    ]
    return table(("`--loss_type`", "reference", "per token", "β", "first loss", "reads"), rows)


def policy_losses() -> str:
    rows = [
        (
            f"`{name}`",
            loss.formula,
            DENOMINATORS.get(loss.divided_by, loss.divided_by),
            flags(loss.reads),
            linked(loss.paper),
        )
        for name, loss in POLICY_LOSSES.items()
    ]
    return table(
        ("`--loss_fn`", "loss of a token", "the sum is divided by", "reads", "paper"), rows
    )


def advantages() -> str:
    rows = [(f"`{name}`", each.formula, linked(each.paper)) for name, each in ADVANTAGES.items()]
    return table(("`--advantages`", "advantage of a completion", "paper"), rows)


def first(name: str) -> str:
    """The loss of a policy that equals its reference, with the loss's own beta; nothing where that
    is not known.
    """
    loss = PREFERENCE_LOSSES[name]
    if not (loss.needs_reference and loss.knows_first_loss):
        return ""
    # exo_pair has no value without label smoothing.
    smoothing = EXO_SMOOTHING if name == "exo_pair" else 0.0
    return f"{first_loss(PreferenceLossSection(loss_type=name, label_smoothing=smoothing)):.5g}"


def linked(papers: str) -> str:
    return re.sub(r"\d{4}\.\d{5}", r"[\g<0>](https://arxiv.org/abs/\g<0>)", papers)


def flags(names: Iterable[str]) -> str:
    return ", ".join(f"`--{name}`" for name in names)


def yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = []
    for cells in (head, ["---"] * len(head), *rows):
        escaped = (cell.replace("|", r"\|") for cell in cells)
        lines.append(f"| {' | '.join(escaped)} |\n")
    return "".join(lines)


TABLES: tuple[Callable[[], str], ...] = (
    preference_losses,
    preference_facts,
    policy_losses,
    advantages,
)


def page(text: str) -> str:
    """The page with its tables as they are now."""
    for each in TABLES:
        start = f"<!-- {each.__name__} -->\n"
        end = "<!-- end -->"
        before, _, rest = text.partition(start)
        text = before + start + each() + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
