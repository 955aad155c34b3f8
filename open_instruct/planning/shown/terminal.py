"""A plan on the terminal: the layout drawn, a bar of a GPU's memory for every phase, traffic, time, advice."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from open_instruct.parallel.picture import draw_layout, wrapped
from open_instruct.planning.advice import Advice
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.plan import Plan
from open_instruct.planning.shown import summary
from open_instruct.planning.subject import units
from open_instruct.planning.subject.words import said
from open_instruct.wording import counted, pages_in

BAR_WIDTH = 48
MAX_LAYOUTS_SHOWN = 8

_ASCII = str.maketrans({"▕": "|", "·": ".", "×": "x", "◀": "<", "▶": ">"})


def print_plan(plan: Plan, advice: Advice, console: Console) -> None:
    """Print everything, with colours where the console has them and in plain lines elsewhere."""
    pages = pages_in(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= {"said": said, "wrapped": wrapped, "counted": counted, "units": units, "summary": summary}
    pages.globals |= {"styled": _styled, "drawn": draw_layout, "bar": _bar, "most_layouts": MAX_LAYOUTS_SHOWN}
    text = pages.get_template("plan.txt.jinja").render(plan=plan, advice=advice)
    for line in Text.from_markup(text, emoji=False).split("\n"):
        line.rstrip()
        if console.options.ascii_only:
            line.plain = line.plain.translate(_ASCII)
        console.print(line, soft_wrap=True, highlight=False)


def _styled(text: str, style: str) -> str:
    return f"[{style}]{escape(text)}[/]"


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
