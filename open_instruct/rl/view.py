"""The view of a GRPO run: a live panel on a terminal, or a line for each step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from open_instruct.core.records import RolloutGroup
from open_instruct.core.text import escape_controls
from open_instruct.parallel.status import this_process
from open_instruct.report.terminal_curve import draw_curve
from open_instruct.run.console import Console, describe_duration
from open_instruct.run.metrics_log import describe_step

REFRESHES_PER_S = 2
BAR_WIDTH = 10
CURVE_HEIGHT = 6
SECONDS_BETWEEN_SAMPLES = 60.0
PROMPT_LETTERS = 60  # the last ones
COMPLETION_LETTERS = 160  # the first ones


class FleetView:
    """Shows phases, queues, the reward so far and staleness.

    Args:
        queues: returns the depths of the queues; called at every refresh.
    """

    def __init__(
        self, console: Console, *, num_steps: int, queues: Callable[[], Mapping[str, float]]
    ) -> None:
        self.console = console
        self.num_steps = num_steps
        self.queues = queues
        self.rewards: list[float] = []
        self._step = 0
        self._first_finish: tuple[int, float] | None = None
        """The first step that this process finished, and when; the pace is that of later steps."""

        self._begin_phase("starting")
        self._latest: Mapping[str, float] = {}
        self._live: Live | None = None
        self._sample: Mapping[str, str] = {}
        self._sample_s = -SECONDS_BETWEEN_SAMPLES

    @contextmanager
    def show(self) -> Iterator[None]:
        """Draw while the block runs; lines of the console appear above the panel."""
        if not self.console.is_live:
            yield
            return
        rich = self.console.rich
        live = Live(
            console=rich,
            get_renderable=self._draw,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
        )
        with live as self._live:
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as the present phase while the block runs."""
        self._begin_phase(name)
        stage = name
        if self._step < self.num_steps:
            stage = f"{name} (step {self._step + 1})"
        this_process.begin(stage)
        yield
        self._begin_phase("between steps")

    def _begin_phase(self, name: str) -> None:
        self._phase = name
        self._phase_began_s = time.monotonic()

    def show_step(self, row: Mapping[str, float], group: RolloutGroup | None = None) -> None:
        """Show the metrics of a finished step, and now and then a completion of `group`."""
        self._step = int(row["step"])
        if self._first_finish is None:
            self._first_finish = self._step, time.monotonic()
        self._latest = row
        self.rewards.append(row["reward"])
        interval = max(1, self.num_steps // 40)
        is_due = self._step % interval == 0 or self._step in (1, self.num_steps)
        say = self.console.log
        if self._live is not None or is_due:
            say = self.console.say
        line = f"step {self._step}/{self.num_steps}  {describe_step(row)}"
        time_left = self._time_left()
        if time_left:
            line += f"  {time_left} left"
        say(line)
        if group is not None and time.monotonic() - self._sample_s >= SECONDS_BETWEEN_SAMPLES:
            self._sample = describe_sample(group, self._step)
            self._sample_s = time.monotonic()
            say = self.console.say if self._live is None else self.console.log
            say("  ".join(f"{name} {words}" for name, words in self._sample.items()))

    def _time_left(self) -> str:
        """Words for the time to the last step; empty before two steps are done, and at the end."""
        if self._first_finish is None:
            return ""
        first_step, finished_s = self._first_finish
        num_timed = self._step - first_step
        num_left = self.num_steps - self._step
        if num_timed == 0 or num_left == 0:
            return ""
        step_s = (time.monotonic() - finished_s) / num_timed
        return describe_duration(step_s * num_left)

    def _progress(self) -> RenderableType:
        progress = Table.grid(padding=(0, 2))
        progress.add_column()
        progress.add_column(no_wrap=True)
        bar = ProgressBar(total=self.num_steps, completed=self._step, width=BAR_WIDTH)
        progress.add_row(bar, f"{self._step} of {self.num_steps}")
        return progress

    def _draw(self) -> RenderableType:
        waited_s = time.monotonic() - self._phase_began_s
        facts = Table.grid(padding=(0, 2))
        facts.add_column(no_wrap=True)  # in a narrow terminal the numbers go on in another line
        facts.add_column()
        facts.add_row("step", self._progress())
        time_left = self._time_left()
        if time_left:
            facts.add_row("time left", time_left)
        facts.add_row("now", f"{self._phase}, {waited_s:.0f} s")
        queues = [f"{name} {value:g}" for name, value in self.queues().items()]
        facts.add_row("queues", "  ".join(queues))
        if self._latest:
            facts.add_row("last step", describe_step(self._latest))
        for name, words in self._sample.items():
            facts.add_row(name, Text(words))
        parts: list[RenderableType] = [facts]
        if len(self.rewards) > 1:
            width = max(20, self.console.rich.width - 6)
            curve = draw_curve(self.rewards, width=width, height=CURVE_HEIGHT, title="reward")
            parts.append(Text(curve))
        return Panel(Group(*parts), title="GRPO", title_align="left")


def describe_sample(group: RolloutGroup, number: int) -> dict[str, str]:
    """A completion of the group and its prompt, each cut to a line without control characters."""
    index = number % len(group.completions)
    prompt = group.prompt.text
    completion = group.completions[index].text
    cut_before = "…" if len(prompt) > PROMPT_LETTERS else ""
    cut_after = "…" if len(completion) > COMPLETION_LETTERS else ""
    return {
        "sample": cut_before + escape_controls(prompt[-PROMPT_LETTERS:]),
        "answer": escape_controls(completion[:COMPLETION_LETTERS]) + cut_after,
        "its reward": f"{group.rewards[index]:g}",
    }
