"""A run's output on the terminal: live progress bars on a terminal, plain lines elsewhere."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from textwrap import TextWrapper

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from open_instruct.core.text import escape_controls
from open_instruct.data.report import WARNING

log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
SECONDS_BETWEEN_PLAIN_LINES = 5.0
NARROW = 72
"""A terminal of fewer columns has no room for the numbers of a step beside a bar."""


def describe_duration(seconds: float) -> str:
    """`40 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Console:
    """What a run prints: rank 0 alone, each line in `run.log` too."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks = speaks
        self.rich = RichConsole(highlight=False, soft_wrap=True)
        self._training_bar: Progress | None = None

    @property
    def is_live(self) -> bool:
        return self.speaks and self.rich.is_terminal

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line."""
        text = escape_controls(text, "\n\t")
        log.info(text)
        self._print(text, style)

    def log(self, text: str) -> None:
        """Write a line to `run.log` alone."""
        log.info(escape_controls(text, "\n\t"))

    def warn(self, text: str) -> None:
        """Print a line as a warning."""
        text = escape_controls(text, "\n\t")
        log.warning(text)
        self._print(f"{WARNING}{text}", "yellow")

    def _print(self, text: str, style: str | None) -> None:
        """Print a line, wrapped at words on a terminal; a long word, such as a path, is not cut."""
        if self.is_live:
            wrapper = TextWrapper(self.rich.width, break_long_words=False, break_on_hyphens=False)
            text = "\n".join(map(wrapper.fill, text.split("\n")))
        if self.speaks:
            self.rich.print(text, style=style, markup=False)

    def report(self, title: str, lines: Iterable[str]) -> None:
        """Say the lines of a `DataReport`, and warn of those that are warnings."""
        for line in lines:
            say = self.warn if line.startswith(WARNING) else self.say
            say(f"{title}: {line.removeprefix(WARNING)}")

    @contextmanager
    def counting(self, title: str) -> Iterator[OnProgress]:
        """Show the progress of a long loop: yields a function of (done, total)."""
        if self.is_live:
            with self._counting_bar(title) as show:
                yield show
            return
        last_s = time.monotonic()

        def print_line(num_done: int, total: int) -> None:
            nonlocal last_s
            is_due = num_done == total or time.monotonic() - last_s > SECONDS_BETWEEN_PLAIN_LINES
            if self.speaks and is_due:
                last_s = time.monotonic()
                self.say(f"{title}: {num_done:,} of {total:,}")

        yield print_line

    @contextmanager
    def _counting_bar(self, title: str) -> Iterator[OnProgress]:
        training_bar = self._training_bar  # a terminal has room for one drawing
        with self._bar() if training_bar is None else nullcontext(training_bar) as bar:
            # A loop that has nothing to do shows no bar.
            task = bar.add_task(title, total=None, detail="", visible=False)
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
            if training_bar is not None:
                training_bar.remove_task(task)

    @contextmanager
    def training(self, *, first_step: int, num_steps: int) -> Iterator[Callable[[int, str], None]]:
        """Show the training loop: yields a function of (step, detail)."""
        if self.is_live:
            with self._bar() as bar:
                self._training_bar = bar
                task = bar.add_task("training", total=num_steps, completed=first_step, detail="")
                yield lambda step, detail: bar.update(task, completed=step, detail=detail)
            self._training_bar = None
            return
        interval = max(1, num_steps // 20)
        began_s = time.monotonic()

        def print_line(step: int, detail: str) -> None:
            if num_steps > step > first_step + 1:  # the first step is a slow one
                left_s = (time.monotonic() - began_s) / (step - first_step) * (num_steps - step)
                detail = f"{detail}  {describe_duration(left_s)} left"
            line = f"step {step}/{num_steps}  {detail}"
            if step in (first_step + 1, num_steps) or step % interval == 0:
                self.say(line)
            else:
                self.log(line)

        yield print_line

    def _bar(self) -> Progress:
        columns = [
            TextColumn("{task.description}", table_column=Column()),
            BarColumn(bar_width=10, table_column=Column(min_width=4)),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
        ]
        if self.rich.width < NARROW:
            return BarAboveWords(*columns, console=self.rich)
        return Progress(
            *columns, TextColumn("{task.fields[detail]}", table_column=Column()), console=self.rich
        )


class BarAboveWords(Progress):
    """Shows the numbers of a loop below its bar, wrapped between words."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            detail = task.fields["detail"]
            if detail:
                yield Text(detail, no_wrap=False, overflow="fold")
