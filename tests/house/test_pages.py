"""What README and docs/ say of the package in numbers and names is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from open_instruct.core.families import FAMILIES
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.preference import PREFERENCE_LOSSES
from tests.house.test_house import DOCS, FLOORS, PACKAGE, REPOSITORY

ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
CHANGELOG = REPOSITORY / "CHANGELOG.md"

WORDS = "two three four five six seven eight nine ten eleven twelve"
NUMBERS = {word: number for number, word in enumerate(WORDS.split(), start=2)}
NUMBER = r"\d+|" + WORDS.replace(" ", "|")
COUNT = re.compile(rf"\b({NUMBER})\s+(policy losses|losses and|kinds of advantages|families)\b")
# `gae` is not one of the kinds: a critic makes those.
COUNTED = {
    "policy losses": len(POLICY_LOSSES),
    "losses and": len(PREFERENCE_LOSSES),
    "kinds of advantages": len(ADVANTAGES) - 1,
    "families": len(FAMILIES),
}
MAX_CHANGELOG_BYTES = 6_000


def counts_of_pages() -> Iterator[tuple[str, str, int]]:
    for page in DOCS:
        for number, noun in COUNT.findall(page.read_text(encoding="utf-8")):
            yield page.name, noun, NUMBERS.get(number) or int(number)


@pytest.mark.parametrize(("page", "noun", "number"), sorted(set(counts_of_pages())))
def test_count_on_a_page_is_the_registrys(page: str, noun: str, number: int) -> None:
    assert number == COUNTED[noun], page


def test_readme_counts_losses_and_advantages() -> None:
    nouns = {noun for page, noun, _ in counts_of_pages() if page == "README.md"}
    assert nouns >= {"policy losses", "losses and", "kinds of advantages"}


def test_contributing_has_the_rooms_in_the_order_that_the_tests_hold() -> None:
    (block,) = re.findall(
        r"From the ground up:\n\n((?:    .*\n)+)", CONTRIBUTING.read_text(encoding="utf-8")
    )
    floors = [{name.strip() for name in floor.split(",")} for floor in block.split("<")]
    held = [floor - {"__init__"} for floor in FLOORS]
    assert floors[:-1] == held[:-1]
    assert floors[-1] == {"entries"}


def test_architecture_names_files_that_exist() -> None:
    (picture,) = re.findall(
        r"```text\n(.*?)```", ARCHITECTURE.read_text(encoding="utf-8"), re.DOTALL
    )
    room = ""
    named: list[Path] = []
    for line in picture.splitlines():
        start, _, _ = line.partition("|")
        if match := re.match(r" (\w+) +", start):
            room = match[1]
            start = start[match.end() :]
        folder = PACKAGE if room == "entries" else PACKAGE / room
        named += [folder / name for name in re.findall(r"\w+", start)]
    assert len(named) > 100
    assert [
        str(path) for path in named if not path.is_dir() and not path.with_suffix(".py").is_file()
    ] == []


def test_changelog_fits_one_page() -> None:
    assert len(CHANGELOG.read_bytes()) <= MAX_CHANGELOG_BYTES
