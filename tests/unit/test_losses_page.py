"""The tables of docs/losses.md say what `config/losses.py` says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from open_instruct.config.dpo import DPOConfig
from open_instruct.config.flags import flags_of
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.losses import OVER_TOKENS, POLICY_LOSSES, PREFERENCE_LOSSES, SMOOTHED

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
DENOMINATORS = {
    "tokens": "tokens",
    "completions": "completions",
    "completions × `--response_length`": "response_length",
}
BETA, SMOOTHING = 0.3, 0.2
FIRST_LOSSES = {
    "ln 2": math.log(2),
    "(1/(2β))²": (1 / (2 * BETA)) ** 2,
    "1": 1.0,
    "2 ln 2": 2 * math.log(2),
    "−ln 2 − ½ ln(ε(1 − ε))": -math.log(2) - math.log(SMOOTHING * (1 - SMOOTHING)) / 2,
    "1/(2β²)": 1 / (2 * BETA**2),
    "½ ln 2 + ½": math.log(2) / 2 + 0.5,
}


def table(first_cell: str, part: int = 0) -> dict[str, list[str]]:
    """The cells behind each name in the first column, of the `part`th table whose head begins with `first_cell`."""
    lines = PAGE.split(f"\n| {first_cell} |")[1 + part].splitlines()[2:]
    rows: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        names, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.replace("||", "| |"))[1:-1])
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), cells)
    return rows


PREFERENCE_ROWS = table("`--loss_type`")
POLICY_ROWS = table("`--loss_fn`")


def test_it_lists_every_loss_and_the_default() -> None:
    assert list(PREFERENCE_ROWS) == list(PREFERENCE_LOSSES) == list(flags_of(DPOConfig)["loss_type"].choices)
    assert list(POLICY_ROWS) == list(POLICY_LOSSES) == list(flags_of(GRPOConfig)["loss_fn"].choices)
    for flag in (flags_of(DPOConfig)["loss_type"], flags_of(GRPOConfig)["loss_fn"]):
        assert f"\n| `{flag.default}` (default) |" in PAGE


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_what_it_says_of_a_preference_loss(name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    *_, reference, per_token, smoothing, papers = PREFERENCE_ROWS[name]
    said = {"reference": loss.needs_reference, "per token": loss.per_token, "smoothing": name in SMOOTHED}
    assert [reference, per_token, smoothing] == ["yes" if is_so else "no" for is_so in said.values()]
    assert re.findall(r"arxiv\.org/abs/([\d.]+)", papers) == list(loss.papers)
    assert float(table("Loss")[name][0]) == loss.beta
    first = table("Loss", 1)[name][0]
    known = next((value for text, value in FIRST_LOSSES.items() if re.match(rf"{re.escape(text)}( =|$)", first)), None)
    assert known == pytest.approx(loss.first_loss(BETA, SMOOTHING)) if loss.first_loss else known is None


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_what_it_says_of_a_policy_loss(name: str) -> None:
    _, divided_by, paper = POLICY_ROWS[name]
    assert DENOMINATORS[divided_by] == POLICY_LOSSES[name].denominator
    assert f"arxiv.org/abs/{POLICY_LOSSES[name].paper})" in paper


def test_who_reads_which_flag() -> None:
    def names(text: str) -> list[str]:
        return re.findall(r"`(\w+)`", text)

    rows = dict(re.findall(r"^\| `--(\w+)` \| [^|]* \| (.*) \|$", PAGE, re.MULTILINE))
    readers: dict[str, list[str]] = {"ld_alpha": [], "f_divergence_type": []}
    for flag in readers:
        readers[flag] = [name for name, loss in PREFERENCE_LOSSES.items() if flag in loss.reads]
    for name, flag in flags_of(DPOConfig).items():
        if flag.other == "loss_type":
            readers[name] = flag.read_with.split()[1:]
    assert {"label_smoothing", "gamma_beta_ratio"} < readers.keys() <= rows.keys()
    for name, losses in readers.items():
        assert names(rows[name]) == losses
    (constant,) = re.findall(r"`--loss_denominator N` replaces the number of tokens in (.*) by N times", PAGE)
    assert names(constant) == OVER_TOKENS
