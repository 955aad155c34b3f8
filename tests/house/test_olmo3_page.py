"""The page of allenai's recipes of OLMo 3: its launches, translated, give the configurations."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import olmo3_page  # noqa: E402
from olmo3_page import FACTS, RECIPES, Recipe, find_differences, make_page  # noqa: E402


def test_page_is_what_launches_and_configurations_say() -> None:
    page = (REPOSITORY / "docs" / "olmo3.md").read_text(encoding="utf-8")
    assert page == make_page(), "run: python scripts/olmo3_page.py > docs/olmo3.md"


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    flags = {flag for recipe in RECIPES for flag in find_differences(recipe)}
    assert flags == set(FACTS["reasons"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.config)
def test_recipe_learns_with_the_settings_of_its_launch(recipe: Recipe) -> None:
    """Models and data go by other names, and GPUs are others."""
    settings = {"learning_rate", "num_epochs", "beta", "loss_type", "optimizer", "warmup_ratio"}
    settings |= {"max_grad_norm", "adam_beta2", "lr_scheduler_type", "packing_strategy", "seed"}
    settings |= {"num_unique_prompts_rollout", "num_samples_per_prompt_rollout"}
    settings |= {"async_steps", "clip_higher", "max_seq_length", "response_length", "loss_fn"}
    assert settings.isdisjoint(find_differences(recipe))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.config)
def test_recipe_fits_with_room_and_keeps_its_batch(recipe: Recipe) -> None:
    assert list(recipe.plans) == list(olmo3_page.NODES)
    plans = [recipe.plan(num_gpus) for num_gpus in recipe.plans]
    assert all(plan.has_room for plan in plans)
    assert len({plan.tokens_per_step for plan in plans}) == 1
