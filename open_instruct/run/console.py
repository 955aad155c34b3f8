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

from open_instruct.core.text import escaped
from open_instruct.data.report import WARNING

log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
SECONDS_BETWEEN_PLAIN_LINES = 5.0
NARROW = 72
"""A terminal of fewer columns has no room for the numbers of a step beside a bar."""


def time_words(seconds: float) -> str:
    """`40 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


class Console:
    """Rank 0 prints, the others are silent; every printed line is in `run.log` too."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks = speaks
        self.rich = RichConsole(highlight=False, soft_wrap=True)
        self._training_bar: Progress | None = None

    @property
    def is_live(self) -> bool:
        return self.speaks and self.rich.is_terminal

    def say(self, text: str, style: str | None = None) -> None:
        """One line for people."""
        text = escaped(text, "\n\t")
        log.info(text)
        self._print(text, style)

    def log(self, text: str) -> None:
        """One line for `run.log` alone."""
        log.info(escaped(text, "\n\t"))

    def warn(self, text: str) -> None:
        """One line that people should not miss."""
        text = escaped(text, "\n\t")
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
            above = self._training_bar  # a terminal has room for one drawing
            with self._bar() if above is None else nullcontext(above) as bar:
                # A loop that has nothing to do shows no bar.
                task = bar.add_task(title, total=None, detail="", visible=False)
                yield lambda done, total: bar.update(
                    task, completed=done, total=total, visible=True
                )
                if above is not None:
                    above.remove_task(task)
            return
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if self.speaks and (
                done == total or time.monotonic() - last > SECONDS_BETWEEN_PLAIN_LINES
            ):
                last = time.monotonic()
                self.say(f"{title}: {done:,} of {total:,}")

        yield line

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

        def line(step: int, detail: str) -> None:
            if num_steps > step > first_step + 1:  # the first step is a slow one
                left_s = (time.monotonic() - began_s) / (step - first_step) * (num_steps - step)
                detail = f"{detail}  {time_words(left_s)} left"
            say = (
                self.say
                if step in (first_step + 1, num_steps) or step % interval == 0
                else self.log
            )
            say(f"step {step}/{num_steps}  {detail}")

        yield line

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
            if detail := task.fields["detail"]:
                yield Text(detail, no_wrap=False, overflow="fold")
