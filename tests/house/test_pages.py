"""What README and docs/ say of the package in numbers and names is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from open_instruct.core.families import FAMILIES
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.migrate.from_suite import OPEN_INSTRUCT, READERS
from tests.house.test_house import DOCS, FLOORS, PACKAGE, REPOSITORY, file_of

ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
CHANGELOG = REPOSITORY / "CHANGELOG.md"
README = REPOSITORY / "README.md"
BENCHMARKS = REPOSITORY / "docs" / "benchmarks.md"
PAGES = [*DOCS, CONTRIBUTING, CHANGELOG, REPOSITORY / "SECURITY.md"]

WORDS = "two three four five six seven eight nine ten eleven twelve"
NUMBERS = {word: number for number, word in enumerate(WORDS.split(), start=2)}
NUMBER = r"\d+|" + WORDS.replace(" ", "|")
COUNT = re.compile(
    rf"\b({NUMBER})\s+(policy losses|losses and|kinds of advantages|families|suites)\b"
)
# `gae` is not one of the kinds: a critic makes those.
COUNTED = {
    "policy losses": len(POLICY_LOSSES),
    "losses and": len(PREFERENCE_LOSSES),
    "kinds of advantages": len(ADVANTAGES) - 1,
    "families": len(FAMILIES),
    "suites": len({*READERS, OPEN_INSTRUCT}),
}
MAX_CHANGELOG_BYTES = 6_000
MAX_LINES = {README: 120, CONTRIBUTING: 80}

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NEVER_ON_A_GPU = re.compile(
    r"\b(?:never|not|none|nothing)\b[^.|:]{0,40}\b(?:run|measured|tried)\b[^.|:]{0,12}\b(?:GPU|CUDA)"
    r"|\bno GPU has\b|\bGPUs?\b[^.|:,]{0,20}\b(?:not|never)\b[^.|:]{0,12}\b(?:run|measured|tried)\b",
    re.IGNORECASE,
)
# A page of the host's, beside the repository: the badge of its tests.
OF_THE_HOST = "../../actions/"


def counts_of_pages() -> Iterator[tuple[str, str, int]]:
    for page in DOCS:
        for number, noun in COUNT.findall(page.read_text(encoding="utf-8")):
            yield page.name, noun, NUMBERS.get(number) or int(number)


@pytest.mark.parametrize(("page", "noun", "number"), sorted(set(counts_of_pages())))
def test_count_on_a_page_is_the_registrys(page: str, noun: str, number: int) -> None:
    assert number == COUNTED[noun], page


def test_readme_counts_losses_and_advantages() -> None:
    nouns = {noun for page, noun, _ in counts_of_pages() if page == "README.md"}
    assert nouns == COUNTED.keys()


@pytest.mark.parametrize("page", MAX_LINES, ids=lambda page: page.name)
def test_first_pages_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MAX_LINES[page]


def test_ratios_in_readme_are_those_of_the_benchmarks() -> None:
    ratios = set(re.findall(r"\b\d+\.\d+x", README.read_text(encoding="utf-8")))
    measured = set(re.findall(r"\*\*(\d+\.\d+x)\*\*", BENCHMARKS.read_text(encoding="utf-8")))
    assert len(ratios) >= 5
    assert ratios <= measured


def test_readme_names_tests_that_exist() -> None:
    named = re.findall(r"tests/\w+/test_\w+\.py", README.read_text(encoding="utf-8"))
    assert len(named) >= 5
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []


def find_anchors(page: Path) -> set[str]:
    """Of its headings, as both GitHub and mkdocs make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(text))
    return {re.sub(r"\s", "-", heading) for heading in plain}


def find_dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", OF_THE_HOST)):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in find_anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert find_dead_links(page) == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_page_of_status_alone_says_what_never_ran_on_a_gpu(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert bool(NEVER_ON_A_GPU.search(text)) == (page.name == "status.md")


def find_unknown_imports(program: Path) -> list[str]:
    """Names that a program takes from the package, and that their module does not have."""
    unknown = []
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE.name):
            continue
        module = file_of(f"{node.module}.x")
        source = module.read_text(encoding="utf-8") if module else ""
        for alias in node.names:
            defined = rf"^(?:def|class) {alias.name}\b|^{alias.name}\b.*=|^from .*\b{alias.name}\b"
            defined += rf'|^    "{alias.name}",$'  # in __all__
            is_module = file_of(f"{node.module}.{alias.name}.x") not in (None, module)
            if not is_module and not re.search(defined, source, re.MULTILINE):
                unknown.append(f"{node.module}.{alias.name}")
    return unknown


@pytest.mark.parametrize(
    "program", sorted((REPOSITORY / "examples").rglob("*.py")), ids=lambda path: path.stem
)
def test_example_imports_what_there_is(program: Path) -> None:
    """`tests/docs/test_examples.py` runs them; this is quick."""
    assert find_unknown_imports(program) == []


def test_unknown_imports_are_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from open_instruct.core.records import Batch, Bach\nimport torch\n")
    assert find_unknown_imports(program) == ["open_instruct.core.records.Bach"]


def test_navigation_of_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    parts = {title: pages for part in site["nav"] for title, pages in part.items()}
    assert list(parts) == ["Start", "Guides", "Reference", "Inside", "Status"]
    entries = [entry for pages in parts.values() for entry in pages]
    named = [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries]
    assert sorted(named) == sorted(page.name for page in (REPOSITORY / "docs").glob("*.md"))
    assert all((REPOSITORY / hook).is_file() for hook in site["hooks"])


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `name`: b\n\n[a](page.md#a-name-b) [b](page.md#c) [c](d.md)\n```\n[e](f)\n```\n"
    )
    assert find_dead_links(page) == ["page.md#c", "d.md"]


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
