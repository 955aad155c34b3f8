"""docs/losses.md has the tables that the losses themselves make."""

import sys
from pathlib import Path

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.config.rollout_sections import RolloutSection

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import losses_page


def test_tables_of_the_losses_page_are_up_to_date() -> None:
    text = losses_page.PAGE.read_text(encoding="utf-8")
    assert text == losses_page.page(text), "run: python scripts/losses_page.py"


def test_losses_page_names_the_defaults() -> None:
    text = losses_page.PAGE.read_text(encoding="utf-8")
    for default in (PreferenceLossSection().loss_type, PolicyLossSection().loss_fn):
        assert f"default is `{default}`" in text
    assert f"| `{RolloutSection().advantage_normalization_type}` |" in text
