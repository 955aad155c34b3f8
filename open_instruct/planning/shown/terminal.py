"""A plan on the terminal: the layout drawn, a bar of a GPU's memory for every phase, traffic, time, advice."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain

from rich.console import Console
from rich.text import Text

from open_instruct.parallel.picture import WIDTH, draw_layout, wrapped
from open_instruct.planning.advice import Advice
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.plan import Plan
from open_instruct.planning.shown import summary
from open_instruct.planning.subject.units import amount, gib, seconds
from open_instruct.planning.subject.words import said
from open_instruct.wording import counted

BAR_WIDTH = 48
MAX_LAYOUTS_SHOWN = 8
WHAT_WIDTH = 36

_ASCII = str.maketrans({"▕": "|", "·": ".", "×": "x", "◀": "<", "▶": ">"})


def print_plan(plan: Plan, advice: Advice, console: Console) -> None:
    """Print everything, with colours where the console has them and in plain lines elsewhere."""
    ascii_only = console.options.ascii_only

    def show(lines: Iterable[Text]) -> None:
        for line in lines:
            line.rstrip()
            if ascii_only:
                line.plain = line.plain.translate(_ASCII)
            console.print(line, soft_wrap=True, highlight=False)

    show(_head(plan))
    if not plan.setting.backend.sharing:
        show([draw_layout(plan.layout)])
    times = _titled("Time of a step, at least", said("time", plan))
    show(chain(_memory(plan), _traffic(plan), times, _ranking(plan, advice)))
    show(_titled("Advice", advice.lines()))


def _head(plan: Plan) -> Iterator[Text]:
    styles = {"headline": "bold", "verdict": "bold green" if plan.fits else "bold red", "work": "dim"}
    for what, style in styles.items():
        for paragraph in said(what, plan):
            yield from _wrapped(paragraph, style=style)
    yield Text()


def _memory(plan: Plan) -> Iterator[Text]:
    """A bar for each phase, its numbers below, and what the letters mean."""
    yield from _title("Memory of one GPU, phase by phase")
    unit_name, unit = summary.unit_of(plan)
    what = "Each row is one phase of the run on the GPU that needs most; its length is what the GPU holds then, in"
    yield from _wrapped(
        f"{what} {unit_name}, and ▕ is where its {plan.setting.device.memory_gib:g} GiB end.", style="dim"
    )
    yield Text()
    name_width = max(len(phase.name) for phase in plan.phases)
    for phase in plan.phases:
        line = Text(f"{phase.name:<{name_width}}  ", style="bold" if phase is plan.peak else "")
        line.append(_bar(phase, plan))
        line.append(f" {gib(phase.total_bytes, unit):>6}")
        if phase is plan.peak:
            line.append(" ◀ most", style="bold" if plan.fits else "bold red")
        yield line
        parts = summary.parts_of(phase, plan)
        # A letter and its number stay on one line.
        sums = " + ".join(f"{summary.LETTERS[label]}\xa0{gib(num_bytes, unit)}" for label, num_bytes in parts)
        for text in textwrap.wrap(sums, WIDTH - name_width - 2):
            yield Text(" " * (name_width + 2) + text.replace("\xa0", " "), style="dim")
    yield Text()
    for label in summary.parts_in_any(plan):
        part = summary.PARTS[label]
        first, *rest = textwrap.wrap(f"{label}: {part['meaning']}", WIDTH - 6)
        letter = Text.assemble("  ", (f" {part['letter']} ", part["style"]), " ")
        yield Text.assemble(letter, (label, "bold"), first.removeprefix(label))
        yield from (Text(f"{'':6}{text}") for text in rest)


def _bar(phase: Phase, plan: Plan) -> Text:
    """Letters for what is there, dots for what is free, and a mark where the GPU ends."""
    bar = Text()
    done, scale = 0, max(plan.setting.device.memory_bytes, plan.peak.total_bytes)
    for label, num_bytes in summary.parts_of(phase, plan):
        done += num_bytes
        # By the running sum, so that rounding never makes the row longer or shorter than the whole.
        upto = round(done / scale * BAR_WIDTH)
        bar.append(summary.LETTERS[label] * (upto - len(bar)), style=summary.PARTS[label]["style"])
    end = round(plan.setting.device.memory_bytes / scale * BAR_WIDTH)
    if len(bar) <= end:
        bar.append("·" * (end - len(bar)) + "▕", style="dim")
    else:
        bar = Text.assemble(bar[:end], ("▕", "bold red"), bar[end:])
    return bar.append(" " * (BAR_WIDTH + 1 - len(bar)))


def _traffic(plan: Plan) -> Iterator[Text]:
    yield from _title("What one GPU exchanges in a step")
    if not (rows := summary.traffic_rows(plan)):
        yield Text("nothing")
        return
    yield Text(f"{'':<{WHAT_WIDTH}}{'calls':>7}{'bytes':>11}{'sends':>11}  GPUs", style="dim")
    for row in rows:
        is_meant = row.first.axis in summary.MEANT_TO_CROSS
        style = "green" if not row.first.crosses_nodes else "yellow" if is_meant else "bold red"
        numbers = f"{row.num_calls:>7,}{amount(row.num_bytes):>11}{amount(row.sent_bytes):>11}  "
        yield Text.assemble(f"{row.what:<{WHAT_WIDTH}}{numbers}", (row.reach, style))


def _ranking(plan: Plan, advice: Advice) -> Iterator[Text]:
    if len(advice.ranked) < 2:
        return
    context = plan.layout.context_parallel_degree
    split = f" with context degree {context}" if context > 1 else ""
    yield from _title(f"The layouts of {counted(plan.layout.world_size, 'GPU')}{split}, the fastest that fits first")
    cells = plan.setting.backend.cells(plan.layout)
    yield Text(f"{_columns(cells)}{'GiB':>10}{'step':>12}{'tokens/s':>14}", style="dim")
    for index, other in enumerate(advice.ranked):
        other_cells = other.setting.backend.cells(other.layout)
        is_this = other_cells == cells
        if index >= MAX_LAYOUTS_SHOWN and not is_this:
            continue
        line = Text(
            f"{_columns(other_cells.values())}{gib(other.peak.total_bytes):>10}"
            f"{seconds(other.time.step_s):>12}{other.tokens_per_second:>14,.0f}"
        )
        if not other.fits:
            line.stylize("dim")
        line.append(f"  {', '.join(summary.notes_on(other))}")
        if is_this:
            line.append(" ◀ this", style="bold")
        yield line
    if (num_more := len(advice.ranked) - MAX_LAYOUTS_SHOWN) > 0:
        yield Text(f"{num_more} more with --json or --html", style="dim")


def _columns(cells: Iterable[object]) -> str:
    return "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, (9, 11, 7), strict=True))


def _titled(title: str, lines: Iterable[str]) -> Iterator[Text]:
    yield from _title(title)
    for line in lines:
        yield from _wrapped(line)


def _title(text: str) -> Iterator[Text]:
    yield Text()
    yield Text(text, style="bold underline")


def _wrapped(text: str, *, style: str = "") -> Iterator[Text]:
    return (Text(line, style=style) for line in wrapped(text).splitlines())
