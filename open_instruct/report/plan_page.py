"""A plan as a person reads it: on one screen, whole, or as a page.

The template plan_short.txt.jinja is for one screen, plan.txt.jinja for the whole (the layout drawn,
a bar of a GPU's memory for every phase, traffic, time, advice), and plan.html.jinja for the page.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from open_instruct.core.text import open_templates, spell_count
from open_instruct.parallel.picture import draw_layout, wrap_paragraph
from open_instruct.planning import presentation
from open_instruct.planning.advice import Advice
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.placement_choice import PlacementChoice
from open_instruct.planning.plan import Plan
from open_instruct.planning.subject import units
from open_instruct.report.templates import render_template

if TYPE_CHECKING:
    from jinja2 import Environment

BAR_WIDTH = 48
MAX_LAYOUTS_SHOWN = 8
MAX_LINES = 40

_ASCII = str.maketrans(
    {
        "▕": "|",
        "·": ".",
        "×": "x",
        "◀": "<",
        "▶": ">",
    }
)


def html_page(plan: Plan, advice: Advice, choice: PlacementChoice | None = None) -> str:
    """The plan as one HTML file with tables and drawings; it has no script and fetches nothing."""
    return render_template(
        "plan.html.jinja",
        plan=plan,
        advice=advice,
        choice=choice,
        render_words=presentation.render_words,
        presentation=presentation,
    )


def print_placements(choice: PlacementChoice, console: Console) -> None:
    """Print the placements as a table, and why one of them is taken."""
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 1, 0, 0),
    )
    for head in presentation.PLACEMENT_HEADS:
        is_text = head in ("placement", "")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for row in presentation.placement_rows(choice):
        table.add_row(*row)
    console.print(table)
    for paragraph in presentation.render_words("placement", choice):
        console.print(wrap_paragraph(paragraph), highlight=False, markup=False)
    console.print()


def print_plan(
    plan: Plan,
    advice: Advice,
    console: Console,
    *,
    is_short: bool = False,
) -> None:
    """Print the plan, with colours where the console has them and in plain lines elsewhere.

    Args:
        is_short: print what fits into `MAX_LINES` of 80 columns, and otherwise everything.
    """
    pages = open_templates(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= {
        "render_words": presentation.render_words,
        "wrapped": wrap_paragraph,
        "counted": spell_count,
        "units": units,
        "presentation": presentation,
    }
    pages.globals |= {
        "styled": _style_text,
        "drawn": draw_layout,
        "bar": _bar,
    }
    if is_short:
        text = _shorten(pages, plan, advice)
    else:
        text = _render(pages, "plan.txt.jinja", plan, advice)
    for line in Text.from_markup(text, emoji=False).split("\n"):
        line.rstrip()
        if console.options.ascii_only:
            line.plain = line.plain.translate(_ASCII)
        console.print(line, soft_wrap=True, highlight=False)


def _render(
    pages: "Environment",
    name: str,
    plan: Plan,
    advice: Advice,
    **limits: Any,
) -> str:
    return pages.get_template(name).render(plan=plan, advice=advice, **limits)


def _shorten(pages: "Environment", plan: Plan, advice: Advice) -> str:
    """Shorten to `MAX_LINES`: fewer layouts, then none, then the fullest phase alone."""
    choices = [(most_layouts, True) for most_layouts in range(MAX_LAYOUTS_SHOWN, -1, -1)]
    text = ""
    for most_layouts, shows_phases in [*choices, (0, False)]:
        limits = {"most_layouts": most_layouts, "shows_phases": shows_phases}
        text = _render(pages, "plan_short.txt.jinja", plan, advice, **limits)
        if len(text.rstrip("\n").split("\n")) <= MAX_LINES:
            break
    return text


def _style_text(text: str, style: str) -> str:
    return f"[{style}]{escape(text)}[/]"


def _bar(phase: Phase, plan: Plan) -> Text:
    """Letters for what is there, dots for what is free, and a mark where the GPU ends."""
    bar = Text()
    memory_bytes = plan.setting.device.memory_bytes
    scale = max(memory_bytes, plan.peak.total_bytes)
    sum_bytes = 0
    for label, num_bytes in presentation.visible_parts(phase, plan):
        sum_bytes += num_bytes
        # By the running sum, so that rounding never makes the row longer or shorter than the whole.
        end = round(sum_bytes / scale * BAR_WIDTH)
        bar.append(
            presentation.LETTERS[label] * (end - len(bar)), style=presentation.PARTS[label]["style"]
        )
    end = round(memory_bytes / scale * BAR_WIDTH)
    if len(bar) <= end:
        bar.append("·" * (end - len(bar)) + "▕", style="dim")
    else:
        bar = Text.assemble(bar[:end], ("▕", "bold red"), bar[end:])
    return bar.append(" " * (BAR_WIDTH + 1 - len(bar)))
