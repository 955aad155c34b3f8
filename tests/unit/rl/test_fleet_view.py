"""What a person sees of a GRPO run, on a terminal and elsewhere."""

import io
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from open_instruct.core.records import RolloutGroup
from open_instruct.rl.view import FleetView
from open_instruct.run.console import Console
from open_instruct.run.metrics_log import describe_step
from tests.unit.fake_rollouts import PROMPT, completion, group_of

QUEUES = {"in_flight": 12, "verifying": 3.0, "waiting": 0}
HOSTILE = "[red]5[/red] [/nothing] \x1b[2J\r\nso\u202e 5"


def row(step: int, **more: float) -> dict[str, float]:
    return {
        "step": step,
        "reward": 0.125 * step,
        "loss": -0.01234,
        "sequence_length/mean": 41.26,
        "staleness/mean": 0.75,
        "time/generate": 3.04,
        "time/train": 2.5,
        "time/sync": 0.123,
        **more,
    }


def group(prompt: str, text: str) -> RolloutGroup:
    answers = [completion(text=text), completion(text="another")]
    return group_of([0.25, 1.0], answers, prompt=replace(PROMPT, text=prompt))


def view_of(*, is_terminal: bool, num_steps: int = 80, width: int = 100) -> FleetView:
    console = Console(speaks=True)
    console.rich = RichConsole(
        file=io.StringIO(),
        record=True,
        force_terminal=is_terminal,
        width=width,
        highlight=False,
        soft_wrap=True,
    )
    return FleetView(console, num_steps=num_steps, queues=lambda: QUEUES)


def lines(view: FleetView) -> list[str]:
    return view.console.rich.export_text().splitlines()


def drawn(view: FleetView) -> str:
    view.console.rich.export_text()
    view.console.rich.print(view._draw())
    return view.console.rich.export_text()


def without_time_left(line: str) -> str:
    return re.sub(r"  \S+ \w+ left$", "", line)


def test_numbers_of_a_step_in_words() -> None:
    words = (
        "loss -0.0123  41.3 tokens/answer  weights 0.8 steps old  idle 3.0 s  trained 2.5 s  "
        "synced 0.1 s"
    )
    assert describe_step(row(2)) == f"reward 0.250  {words}"
    assert describe_step(row(2) | {"eval/reward": 0.5}) == f"reward 0.250  held-out 0.500  {words}"


class TestPlainLines:
    @pytest.mark.parametrize(("num_steps", "said"), [(80, (1, *range(2, 81, 2))), (3, (1, 2, 3))])
    def test_first_last_and_some_between_are_said_and_all_are_logged(
        self, num_steps: int, said: tuple[int, ...], caplog: pytest.LogCaptureFixture
    ) -> None:
        view = view_of(is_terminal=False, num_steps=num_steps)
        with caplog.at_level(logging.INFO), view.show():
            for step in range(1, num_steps + 1):
                view.show_step(row(step))
        words = [
            f"step {step}/{num_steps}  {describe_step(row(step))}"
            for step in range(1, num_steps + 1)
        ]
        assert [without_time_left(line) for line in lines(view)] == [
            words[step - 1] for step in said
        ]
        assert [without_time_left(record.message) for record in caplog.records] == words

    def test_time_left_is_that_at_the_pace_of_the_steps_behind_the_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr("open_instruct.rl.view.time.monotonic", lambda: clock.now)
        view = view_of(is_terminal=False, num_steps=5)
        for step in (2, 3, 4, 5):  # of a run that goes on behind its first step
            clock.now += 30
            view.show_step(row(step))
        assert [line.partition("synced 0.1 s")[2] for line in lines(view)] == [
            "",
            "  60 s left",
            "  30 s left",
            "",
        ]
        assert "3 of 5" not in drawn(view) and "5 of 5" in drawn(view)

    def test_sample_is_one_line_that_steers_no_terminal(self) -> None:
        view = view_of(is_terminal=False)
        view.show_step(row(2), group("x" * 100 + "What is 2 + 3?\n", HOSTILE + "y" * 500))
        (said,) = [line for line in lines(view) if "sample" in line]
        assert (
            said.startswith("sample …x")
            and "What is 2 + 3?\\n  answer [red]5[/red] [/nothing] \\x1b[2J" in said
        )
        assert "\\r\\nso\\u202e 5yyy" in said and said.endswith("y…  its reward 0.25")
        assert len(said) < 300 and said.isprintable()

    def test_sample_comes_now_and_then_and_another_one_each_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr("open_instruct.rl.view.time.monotonic", lambda: clock.now)
        view = view_of(is_terminal=False)
        for step in range(1, 8):
            view.show_step(row(step), group("p", "a"))
            clock.now += 20
        said = [line for line in lines(view) if line.startswith("sample")]
        another, first = (
            "sample p  answer another  its reward 1",
            "sample p  answer a  its reward 0.25",
        )
        assert said == [another, first, another]


class TestPanel:
    def test_before_the_first_step(self) -> None:
        view = view_of(is_terminal=True)
        with view.phase("waiting for rollouts"):
            text = drawn(view)
        assert "0 of 80" in text
        assert re.search(r"waiting for rollouts, \d+ s", text)
        assert "in_flight 12  verifying 3  waiting 0" in text
        assert "last step" not in text and "reward" not in text

    @pytest.mark.parametrize("width", [30, 80, 160])
    def test_after_some_steps_it_has_the_curve_and_a_sample_and_keeps_to_the_width(
        self, width: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        view = view_of(is_terminal=True, width=width)
        with caplog.at_level(logging.INFO), view.show():
            for step in range(1, 9):
                view.show_step(row(step), group("What is 2 + 3?", "a"))
        assert "sample What is 2 + 3?  answer another" in caplog.text
        text = drawn(view)
        assert "8 of 80" in text and "last step" in text and "sample" in text
        assert "1 ┤" in text and "0.125 ┤" in text  # the largest reward and the smallest
        assert max(map(len, text.splitlines())) <= width

    def test_narrow_terminal_cuts_no_word(self) -> None:
        view = view_of(is_terminal=True, width=40)
        for step in (1, 2):
            view.show_step(row(step), group("What is 2 + 3?", "The answer is five"))
        words = set(drawn(view).split())
        assert {"in_flight", "verifying", "waiting", "sample", "reward", "loss", "trained"} <= words

    def test_terminal_of_80_columns_shows_a_sample_whole(self) -> None:
        view = view_of(is_terminal=True, width=80)
        answer = "[red]5[/red] " + "".join(f"word{n} " for n in range(18))
        view.show_step(row(2), group("What is 2 + 3?", answer))
        text = drawn(view)
        assert set(answer.split()) <= set(text.split())
        assert len(text.splitlines()) < 24

    def test_fleet_view_is_live_below_printed_lines(self) -> None:
        view = view_of(is_terminal=True, width=160)
        with view.show():
            view.show_step(row(1))
            view.show_step(row(2))
            with view.phase("training"):
                view._live.refresh()
        text = view.console.rich.file.getvalue()
        assert f"step 1/80  {describe_step(row(1))}" in text
        assert text.rindex("GRPO") > text.index("step 2/80")
        assert re.search(r"training, \d+ s", text)

    def test_fleet_view_ends_with_the_run(self) -> None:
        view = view_of(is_terminal=True)
        with pytest.raises(KeyboardInterrupt), view.show():
            raise KeyboardInterrupt
        view.show_step(row(3))
        assert view._live is not None and not view._live.is_started
