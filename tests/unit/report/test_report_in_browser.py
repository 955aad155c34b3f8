"""Pages as a browser shows them: on a phone and on a desk, in the light and in the dark."""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.resolved import write_config
from open_instruct.planning.advice import Advice
from open_instruct.report.page import report_page
from open_instruct.report.plan_page import html_page
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.run.run_directory import RunDirectory
from tests.docs.pages import REPOSITORY
from tests.tiers import mark_extended
from tests.unit.commands import test_plan_command
from tests.unit.report import test_report

sys.path.insert(0, str(REPOSITORY / "scripts"))

from browser import CHROMIUM, Scheme, Tab, browser

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium, to open the pages")

run = test_report.run
LOOKS: list[tuple[int, Scheme]] = list(product((400, 1200), ("light", "dark")))
# What sticks out of the page, and is in no box of its own that scrolls.
OUTSIDE = """[...document.querySelectorAll("body *")]
    .filter(node => node.getBoundingClientRect().right > innerWidth + 1 && !node.closest(".scroll"))
    .map(node => node.outerHTML.slice(0, 100))"""
# Words that are cut, because they are wider than what they stand in.
CUT = """[...document.querySelectorAll("p, h1, h2, h3, figcaption, .track i")]
    .filter(node => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline")
    .map(node => node.outerHTML.slice(0, 100))"""
CHARTS = """[...document.querySelectorAll("#charts figure:not([hidden])")].map(node => ({
    name: node.querySelector("figcaption").textContent, meaning: node.querySelector(".meaning").textContent,
    group: node.parentElement.previousElementSibling.textContent, num_raw: node.querySelectorAll(".raw").length,
    ticks: [...node.querySelectorAll("text[text-anchor=end].small")].map(text => text.textContent) }))"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run of another policy loss, with numbers of its own."""
    directory = RunDirectory(
        path=tmp_path / "a_run_with_a_name_that_is_longer_than_a_phone_is_wide"
    )
    directory.create()
    write_config(
        test_report.grpo_config(directory.path, "--loss_fn", "cispo"), directory.config, {}
    )
    metrics = MetricsLog(directory.metrics)
    for step in range(1, 13):
        numbers = {
            "reward": 0.1 * step,
            "loss": -0.5 * step,
            "policy_loss": 0.1 * step,
            "clip_fraction": 0.01 * step,
        }
        counts = {"lr": 1e-6 * (13 - step), "num_tokens": 25_000 * step, "mine/own": 3 * step}
        metrics.write({"step": step} | numbers | counts)
    return directory.path


def opened(
    tab: Tab, folder: Path, text: str, *, width: int, scheme: Scheme = "light", height: int = 900
) -> None:
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    tab.open(file, width=width, height=height, scheme=scheme)


def check_fits(tab: Tab, width: int) -> None:
    assert tab.errors == []
    assert tab.said("document.documentElement.scrollWidth") <= width
    assert tab.said(OUTSIDE) == [] and tab.said(CUT) == []


def charts_of(tab: Tab) -> dict[str, dict[str, Any]]:
    return {chart["name"]: chart for chart in tab.said(CHARTS)}


@pytest.mark.parametrize(
    ("width", "scheme"), mark_extended(LOOKS, but=[(400, "dark"), (1200, "light")])
)
class TestLooks:
    def test_page_of_a_run_shows_a_rollout(
        self, tab: Tab, run: Path, tmp_path: Path, width: int, scheme: Scheme
    ) -> None:
        opened(tab, tmp_path, report_page([run], max_rollouts=100), width=width, scheme=scheme)
        tab.said('document.querySelectorAll("details").forEach(node => { node.open = true; })')
        check_fits(tab, width)
        box = tab.said('document.getElementById("headline").getBoundingClientRect().toJSON()')
        assert box["height"] > 25 and box["top"] < 900
        main = tab.said(
            'document.querySelector("#main-curve path.curve").getBoundingClientRect().toJSON()'
        )
        assert main["bottom"] < 900
        background = tab.said("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        tab.said('document.querySelectorAll("#rollout-table tr[tabindex]")[2].click()')
        tab.settle()
        check_fits(tab, width)
        assert (
            tab.said(
                '[...document.querySelectorAll("#sample .checks td")].map(node => node.textContent)'
            )[0]
            == "math"
        )
        assert tab.said('document.querySelectorAll("#sample canvas.strip").length') == 3
        legends = tab.said(
            '[...document.querySelectorAll("#sample .legend")].map(node => node.textContent)'
        )
        assert legends[1] == "below 00above 0" and len(legends) == 3

    def test_page_compares_two_runs(
        self, tab: Tab, run: Path, other: Path, tmp_path: Path, width: int, scheme: Scheme
    ) -> None:
        opened(tab, tmp_path, report_page([run, other], max_rollouts=9), width=width, scheme=scheme)
        check_fits(tab, width)

    def test_page_shows_a_plan(self, tab: Tab, tmp_path: Path, width: int, scheme: Scheme) -> None:
        plan = test_plan_command.planned(*test_plan_command.DPO_7B)
        opened(tab, tmp_path, html_page(plan, Advice(plan)), width=width, scheme=scheme)
        check_fits(tab, width)


def drawn(tab: Tab) -> list[int]:
    """How many paths each figure has that is there to have a curve."""
    return tab.said(
        '[...document.querySelectorAll("figure.chart svg")].map(n => '
        'n.querySelectorAll("path").length)'
    )


class TestPaper:
    def test_every_curve_is_drawn_before_it_is_printed(
        self, tab: Tab, other: Path, tmp_path: Path
    ) -> None:
        opened(
            tab,
            tmp_path,
            report_page([other], max_rollouts=0),
            width=1200,
            height=300,
            scheme="dark",
        )
        # As if printed at once: all curves wait that are not in sight.
        tab.said("redraw(), dispatchEvent(new Event('beforeprint'))")
        assert tab.said("charts.length") + 1 == len(drawn(tab)) and all(drawn(tab))
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.said("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        tab.call("Emulation.setEmulatedMedia", media="")


class TestPhone:
    def test_completions_are_as_wide_as_the_screen(
        self, tab: Tab, run: Path, tmp_path: Path
    ) -> None:
        opened(tab, tmp_path, report_page([run], max_rollouts=100), width=390)
        widths = tab.said(
            '[...document.querySelectorAll("#rollout-table td.text")].map(node => '
            "node.getBoundingClientRect().width)"
        )
        assert min(widths) > 350


class TestMainCurve:
    def test_it_shows_the_metric_that_is_chosen(
        self, tab: Tab, other: Path, tmp_path: Path
    ) -> None:
        opened(tab, tmp_path, report_page([other], max_rollouts=0), width=1200)
        shown = 'document.querySelector("#main-curve figcaption").textContent'
        assert tab.said(shown) == "reward"
        tab.said(
            """const select = byId("main-metric");
            select.value = [...select.options].find(option => option.textContent === "mine/own").value;
            select.dispatchEvent(new Event("input"))"""
        )
        assert tab.said(shown) == "mine/own"

    def test_dragging_zooms_all_curves_and_a_button_shows_all_steps(
        self, tab: Tab, other: Path, tmp_path: Path
    ) -> None:
        opened(tab, tmp_path, report_page([other], max_rollouts=0), width=1200, height=4000)
        box = tab.said('document.querySelector("#main-curve svg").getBoundingClientRect().toJSON()')
        y = box["top"] + box["height"] / 2
        for kind, share in (("mousePressed", 0.5), ("mouseMoved", 0.7), ("mouseReleased", 0.9)):
            x = box["left"] + share * box["width"]
            tab.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                buttons=1,
                clickCount=1,
            )
        tab.settle()
        assert tab.said("zoom.first") == pytest.approx(6.3, abs=0.4)
        assert tab.said("zoom.last") == pytest.approx(10.9, abs=0.4)
        assert charts_of(tab)["reward"]["ticks"][0] != "0.5"
        tab.said('byId("all-steps").click()')
        assert tab.said("zoom") is None


class TestCurves:
    def test_curves_stand_in_groups_with_units_and_meanings(
        self, tab: Tab, other: Path, tmp_path: Path
    ) -> None:
        opened(tab, tmp_path, report_page([other], max_rollouts=0), width=1200, height=4000)
        charts = charts_of(tab)
        groups = [chart["group"] for chart in charts.values()]
        assert list(dict.fromkeys(groups)) == ["Learning", "Policy", "Optimizer and data", "Others"]
        assert list(charts)[:2] == ["reward", "loss"]
        assert charts["clip_fraction (share)"]["meaning"].startswith("tokens that the clip range")
        assert charts["mine/own"]["meaning"] == ""

    def test_ticks_are_as_people_write_them(self, tab: Tab, other: Path, tmp_path: Path) -> None:
        opened(tab, tmp_path, report_page([other], max_rollouts=0), width=1200, height=4000)
        charts = charts_of(tab)
        assert charts["lr"]["ticks"][:2] == ["5e-6", "1e-5"]
        assert charts["num_tokens (tokens)"]["ticks"][:3] == ["100k", "200k", "300k"]
        assert charts["reward"]["ticks"][:2] == ["0.5", "1"]
        assert tab.said("ticksBetween(3, 3)") == [3] and tab.said("ticksBetween(1, 3, 1)") == [
            1,
            2,
            3,
        ]
        assert tab.said("logTicksBetween(1e-7, 0.02)") == pytest.approx([1e-6, 1e-4, 1e-2])
        assert tab.said("tickWords([-0.25, 0, 12500, 2.5e7, 1e-9, 3e15])") == [
            *("-2.5e-1", "0", "12.5k", "25M", "1e-9", "3e15")
        ]

    def test_rates_and_counts_are_not_smoothed(self, tab: Tab, other: Path, tmp_path: Path) -> None:
        opened(tab, tmp_path, report_page([other], max_rollouts=0), width=1200, height=4000)
        charts = charts_of(tab)
        exact = {name.split(" ")[0] for name, chart in charts.items() if not chart["num_raw"]}
        assert exact == {"lr", "num_tokens"}

    def test_different_losses_are_on_axes_of_their_own(
        self, tab: Tab, run: Path, other: Path, tmp_path: Path
    ) -> None:
        opened(tab, tmp_path, report_page([run, other], max_rollouts=0), width=1200, height=4000)
        names = list(charts_of(tab))
        assert names[:3] == ["reward", "loss (dapo)", "loss (cispo)"]
