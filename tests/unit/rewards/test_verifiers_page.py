"""docs/rewards.md has a table of what the verifiers read, and says of each what it does."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import verifiers_page

from open_instruct.rewards.registry import BUILT_IN


def test_table_of_verifiers_is_up_to_date() -> None:
    text = verifiers_page.PAGE.read_text(encoding="utf-8")
    assert text == verifiers_page.page(text), "run: python scripts/verifiers_page.py"


def test_page_says_what_each_verifier_does() -> None:
    text = verifiers_page.PAGE.read_text(encoding="utf-8").partition(verifiers_page.START)[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    built_in = {kind.name for kind in BUILT_IN}
    assert {name for name in built_in if not name.startswith("general-")} <= named
    assert "general-…" in named
