"""What a run shows on a terminal while it counts and trains."""

import io
import logging

import pytest
from rich.console import Console as RichConsole

from open_instruct.run.console import Console
from open_instruct.run.metrics_log import describe_step


def console_of(width: int, *, is_terminal: bool = False) -> Console:
    """A console whose text is recorded."""
    console = Console(speaks=True)
    console.rich = RichConsole(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=is_terminal,
        highlight=False,
        soft_wrap=True,
    )
    return console


def test_warning_of_the_rows_is_one_on_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    console = console_of(100)
    with caplog.at_level(logging.INFO):
        console.report("training data", ["240 pairs", "warning: 203 of 240 rows are cut"])
    assert console.rich.export_text().splitlines() == [
        "training data: 240 pairs",
        "warning: training data: 203 of 240 rows are cut",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_line_steers_no_terminal(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    console = Console(speaks=True)
    with caplog.at_level("INFO"):
        for say in (console.say, console.warn, console.log):
            say("a\x9bb\u202ec\ud800\n[red]")
    told = capsys.readouterr().out
    assert told.count("a\\x9bb\\u202ec\\ud800\n[red]") == 2
    assert {record.message for record in caplog.records} == {"a\\x9bb\\u202ec\\ud800\n[red]"}


def test_terminal_of_80_columns_cuts_nothing_and_splits_no_word() -> None:
    path = "/cache" + "/folder" * 15
    said = (
        f"a line of words that is longer than the terminal is wide, with a path in it: {path} "
        "and  two  blanks\n\tx"
    )
    for is_terminal in (True, False):
        console = console_of(80, is_terminal=is_terminal)
        console.say(said)
        text = console.rich.export_text()
        lines = text.splitlines()
        assert text.split() == said.split()
        assert (len(lines) > 3) == is_terminal and path in text
        assert not is_terminal or all(len(line) <= 80 or line == path for line in lines)


@pytest.mark.parametrize("width", [40, 80])
def test_bar_of_the_training_shows_all_numbers_whole(width: int) -> None:
    row = {
        "loss": 0.6931,
        "rewards/margin": 0.5,
        "rewards/accuracy": 0.5,
        "tokens_per_second": 12345,
    }
    words = describe_step(row | {"peak_memory_gib": 12.25})
    console = console_of(width, is_terminal=True)
    with console.training(first_step=0, num_steps=1000) as show:
        show(123, words)
    text = console.rich.export_text()
    assert set(words.split()) <= set(text.split())
    assert text.startswith("training ") and "123/1000" in text
    # Beside each other, in a narrow terminal too.
    assert "loss 0.6931  margin +0.5000  accuracy" in text


def test_rows_are_counted_below_the_bar_of_the_training() -> None:
    """A terminal has room for one live drawing: two of them are an error of rich's."""
    console = console_of(100, is_terminal=True)
    with console.training(first_step=0, num_steps=4) as show:
        for step in (1, 2):
            show(step, "loss 0.69")
            with console.counting(f"held-out pairs at step {step}") as on_progress:
                on_progress(3, 6)
                on_progress(6, 6)
            console.say(f"held-out accuracy at step {step}: 0.5")
        show(4, "loss 0.5")
    with console.counting("exported") as on_progress:
        on_progress(2, 2)
    text = console.rich.export_text()
    assert "held-out accuracy at step 2: 0.5" in text
    assert "training" in text and "4/4" in text
    last = text.splitlines()[-1]
    assert last.startswith("exported") and "2/2" in last


def test_loop_with_nothing_to_do_shows_no_bar() -> None:
    console = console_of(80, is_terminal=True)
    with console.counting("rows of nothing"):
        pass
    assert "rows of nothing" not in console.rich.export_text()
