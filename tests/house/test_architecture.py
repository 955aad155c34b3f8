"""docs/architecture.md: the two ways it lists are as long as it says, and lead through functions
that exist.
"""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "open_instruct"
PAGE = REPOSITORY / "docs" / "architecture.md"
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")

# Files that each way may pass: one more means a layer that had better not be.
WAYS = {"From a row to its gradient": 17, "From a prompt to new weights in the engines": 32}


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")
    assert rest, f"no heading '{title}'"
    return rest.partition("\n## ")[0]


def has(tree: ast.Module, dotted: str) -> bool:
    """Whether a module defines the class or function, a method by its class: `Driver.fit`."""
    bodies: list[ast.stmt] = tree.body
    for name in dotted.split("."):
        found = [
            node
            for node in bodies
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ]
        if not found:
            return False
        bodies = found[0].body
    return True


@pytest.mark.parametrize(
    ("file", "name"), sorted(set(PLACE.findall(PAGE.read_text(encoding="utf-8"))))
)
def test_functions_that_the_page_names_exist(file: str, name: str) -> None:
    assert has(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), name)


@pytest.mark.parametrize("title", WAYS)
def test_way_is_as_long_as_it_says_and_not_too_long(title: str) -> None:
    text = section(title)
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py):", text, re.M)
    files = [file for _, file in steps]
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len(set(files)) == len(files), "a file is one step"
    said = re.search(r"(\d+) files:", text)
    assert said is not None and int(said[1]) == len(files) <= WAYS[title]


def test_picture_has_every_room() -> None:
    drawn = set(re.findall(r"^ (\w+) ", section("The house"), re.M))
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= drawn and drawn <= rooms | {"entries"}


def test_picture_stands_on_the_floors_that_are_held() -> None:
    from tests.house.test_house import FLOORS

    drawn = re.findall(r"^ (\w+) ", section("The house"), re.M)[1:-1]
    held = [room for floor in FLOORS[1:-1] for room in sorted(floor)]
    assert drawn[::-1] == held
