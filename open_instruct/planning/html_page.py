"""A plan as one HTML file: tables and drawings of our own, no script, nothing fetched, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from open_instruct.parallel.wording import counted, group_name
from open_instruct.planning.advice import Advice
from open_instruct.planning.drawing import Drawing
from open_instruct.planning.parts import LETTERS, meaning_of, parts_in_any, parts_of, unit_of
from open_instruct.planning.plan import Plan
from open_instruct.planning.sentences import (
    headline,
    notes_on,
    time_lines,
    traffic_rows,
    verdict,
    work_lines,
)
from open_instruct.planning.wording import amount, gib, seconds

NUM_COLOURS = 12
MAX_NODES_DRAWN, NODES_DRAWN_FIRST = 8, 4
MAX_RANKS_DRAWN = 16
RANKS_IN_A_ROW = 8
PAGE_WIDTH = 880

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --panel: #f5f6f8; --ink: #1c2127; --soft: #5b6572; --line: #d5dae0;
  --good: #1a7f45; --fair: #9a6700; --bad: #c62f2f;
  --c0: #4c8dd6; --c1: #e07b39; --c2: #5aa469; --c3: #9b6dc6; --c4: #d9b232; --c5: #d0577a; --c6: #3aa5a0;
  --c7: #8c7355; --c8: #7486a8; --c9: #a3b84a; --c10: #c78fb5; --c11: #9aa0a8; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --panel: #1d2228; --ink: #e7eaee; --soft: #9aa5b1; --line: #363e48;
  --good: #57c785; --fair: #e2b64b; --bad: #ff7b72;
  --c0: #5b9be3; --c1: #e88d50; --c2: #66b878; --c3: #ab80d6; --c4: #dcbb4a; --c5: #de6b8d; --c6: #4bb7b2;
  --c7: #a58a69; --c8: #8799bb; --c9: #b0c45c; --c10: #d6a1c6; --c11: #a9afb7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 960px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; line-height: 1.3; margin: 0 0 8px; }
h2 { font-size: 18px; margin: 40px 0 8px; }
p { margin: 6px 0; }
.soft, figcaption, caption { color: var(--soft); }
.verdict { font-weight: 600; padding: 10px 14px; border-left: 4px solid; background: var(--panel); margin: 14px 0; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
figure { margin: 12px 0; overflow-x: auto; } svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
svg .strong { font-weight: 600; } svg .inside { fill: #101418; font-size: 12px; } svg .small { font-size: 11px; }
svg .free { fill: var(--panel); stroke: var(--line); } svg .edge { stroke: var(--bad); stroke-width: 2; }
svg .box { fill: var(--panel); stroke: var(--line); } svg .joined { stroke: var(--soft); stroke-width: 3; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 8px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: nowrap; }
th, .wide { white-space: normal; }
th { color: var(--soft); font-weight: 600; } .left { text-align: left; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
.this td { background: var(--panel); font-weight: 600; } .off td { color: var(--soft); }
code { background: var(--panel); padding: 2px 5px; border-radius: 4px; }
""" + "".join(f"\nsvg .c{i} {{ fill: var(--c{i}); }} .b{i} {{ background: var(--c{i}); }}" for i in range(NUM_COLOURS))


def html_page(plan: Plan, advice: Advice) -> str:
    """The whole file."""
    title = escape(headline(plan))
    body = "\n".join(
        [
            f"<h1>{title}</h1>",
            f'<p class="verdict {"good" if plan.fits else "bad"}">{escape(verdict(plan))}</p>',
            *(f'<p class="soft">{escape(line)}</p>' for line in work_lines(plan)),
            *_advice(plan, advice),
            *_memory(plan),
            *_layout(plan),
            *_traffic(plan),
            *_time(plan),
            *_ranking(plan, advice),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _advice(plan: Plan, advice: Advice) -> Iterator[str]:
    yield "<h2>Advice</h2>"
    for line in advice.lines(plan):
        what, _, flags = line.partition(": ")
        yield f"<p>{escape(what)}: <code>{escape(flags)}</code></p>" if "--" in flags else f"<p>{escape(line)}</p>"


def _memory(plan: Plan) -> Iterator[str]:
    """A bar for each phase, what its parts are, and the numbers as a table."""
    unit_name, unit = unit_of(plan)
    colours = {label: index for index, label in enumerate(LETTERS)}
    yield "<h2>Memory of one GPU, phase by phase</h2>"
    yield (
        '<p class="soft">Each bar is one phase of the run on the GPU that needs most. The red line is where its '
        f"{plan.setting.device.memory_gib:g} GiB end.</p>"
    )
    left, right, row = 110, 90, 34
    width = PAGE_WIDTH - left - right
    scale = width / max(plan.memory_bytes, plan.peak.total_bytes)
    drawing = Drawing(PAGE_WIDTH, row * len(plan.phases) + 24, "Memory of one GPU in each phase")
    for index, phase in enumerate(plan.phases):
        y, x = 4 + row * index, float(left)
        style = "strong" if phase is plan.peak else ""
        drawing.text(left - 10, y + 17, phase.name, anchor="end", style=style)
        drawing.rectangle(left, y, plan.memory_bytes * scale, row - 10, "free")
        for label, num_bytes in parts_of(phase, plan):
            part = num_bytes * scale
            if part > 0:
                drawing.rectangle(
                    x, y, part, row - 10, f"c{colours[label]}", f"{label}: {gib(num_bytes, unit)} {unit_name}"
                )
            if part > 30:
                drawing.text(x + part / 2, y + 17, gib(num_bytes, unit), anchor="middle", style="inside")
            x += part
        drawing.text(PAGE_WIDTH - right + 10, y + 17, f"{gib(phase.total_bytes, unit)} {unit_name}", style=style)
    end = left + plan.memory_bytes * scale
    bottom = row * len(plan.phases)
    drawing.line(end, 0, end, bottom, "edge")
    drawing.text(end, bottom + 16, f"{plan.setting.device.memory_gib:g} GiB", anchor="end", style="soft")
    yield f"<figure>{drawing.svg()}</figure>"
    names = "".join(f"<th>{escape(phase.name)}</th>" for phase in plan.phases)
    parts_of_phases = [dict(phase.parts) for phase in plan.phases]
    rows = []
    for label in parts_in_any(plan):
        cells = "".join(f"<td>{gib(parts[label], unit) if parts.get(label) else ''}</td>" for parts in parts_of_phases)
        meaning = meaning_of(label, plan)
        rows.append(
            f'<tr><td class="left wide"><span class="swatch b{colours[label]}"></span><b>{escape(label)}</b>'
            f'<br><span class="soft">{escape(meaning)}</span></td>{cells}</tr>'
        )
    total = "".join(f"<td><b>{gib(phase.total_bytes, unit)}</b></td>" for phase in plan.phases)
    rows.append(f'<tr><td class="left"><b>together</b></td>{total}</tr>')
    yield f'<div class="scroll"><table><tr><th class="left">{unit_name}</th>{names}</tr>{"".join(rows)}</table></div>'


def _layout(plan: Plan) -> Iterator[str]:
    """Nodes as boxes, GPUs coloured and lettered by their shard group."""
    layout = plan.layout
    yield "<h2>Layout</h2>"
    whole = (
        "the whole model on one GPU, without FSDP"
        if layout.single_device
        else (
            f"{counted(layout.num_replicas, 'replica')} of the model, each split over "
            f"{counted(layout.shard_group_size * layout.tensor_parallel_degree, 'GPU')}"
        )
    )
    yield (
        f'<p class="soft">{whole}. GPUs with the same letter are a shard group: together they hold one copy, or one '
        "part of it where lines join tensor ranks.</p>"
    )
    groups = {rank: index for index, group in enumerate(layout.shard_groups) for rank in group}
    drawn = list(range(len(layout.nodes)))
    if len(drawn) > MAX_NODES_DRAWN:
        drawn = [*drawn[:NODES_DRAWN_FIRST], drawn[-1]]
    cell, gap = 46, 14
    box = RANKS_IN_A_ROW * cell + 20
    tall = 40 + cell * max(-(-min(layout.gpus_per_node[node], MAX_RANKS_DRAWN) // RANKS_IN_A_ROW) for node in drawn)
    rows = -(-len(drawn) // 2)
    drawing = Drawing(2 * box + gap + 4, rows * (tall + gap), "Shard groups on the nodes")
    for place, node in enumerate(drawn):
        x, y = 2 + place % 2 * (box + gap), 2 + place // 2 * (tall + gap)
        drawing.rectangle(x, y, box, tall, "box")
        ranks = layout.nodes[node]
        more = f", {len(ranks) - MAX_RANKS_DRAWN} more not drawn" if len(ranks) > MAX_RANKS_DRAWN else ""
        drawing.text(x + 10, y + 20, f"node {node}: ranks {ranks[0]} to {ranks[-1]}{more}", style="soft")
        for index, rank in enumerate(ranks[:MAX_RANKS_DRAWN]):
            left, top = x + 10 + index % RANKS_IN_A_ROW * cell, y + 32 + index // RANKS_IN_A_ROW * cell
            if rank % layout.tensor_parallel_degree and index % RANKS_IN_A_ROW:
                drawing.line(left - 8, top + 20, left + 4, top + 20, "joined")
            group = groups[rank]
            drawing.rectangle(left + 2, top, cell - 6, cell - 6, f"c{group % NUM_COLOURS}", f"rank {rank}")
            drawing.text(left + cell / 2 - 1, top + 18, group_name(group), anchor="middle", style="inside strong")
            drawing.text(left + cell / 2 - 1, top + 33, str(rank), anchor="middle", style="inside small")
    caption = ""
    if len(drawn) < len(layout.nodes):
        caption = f"<figcaption>{counted(len(layout.nodes) - len(drawn), 'node')} between them not drawn</figcaption>"
    yield f"<figure>{drawing.svg()}{caption}</figure>"
    for warning in layout.warnings:
        yield f'<p class="fair">{escape(warning)}</p>'


def _traffic(plan: Plan) -> Iterator[str]:
    yield "<h2>What one GPU exchanges in a step</h2>"
    rows = []
    for row in traffic_rows(plan):
        style = "good" if not row.crosses_nodes else "fair" if row.is_meant_to_cross else "bad"
        rows.append(
            f'<tr><td class="left wide">{escape(row.what)}</td><td class="left">{escape(row.collective)}</td>'
            f"<td>{row.num_calls:,}</td><td>{amount(row.num_bytes)}</td><td>{amount(row.sent_bytes)}</td>"
            f'<td class="left {style}">{escape(row.reach)}</td></tr>'
        )
    if not rows:
        yield "<p>Nothing.</p>"
        return
    yield _table(("what|left", "collective|left", "calls", "bytes", "sends", "GPUs|left"), rows)


def _time(plan: Plan) -> Iterator[str]:
    """Three bars on one scale: the longest is the bound."""
    yield "<h2>Time of a step, at least</h2>"
    times = {
        "arithmetic": plan.time.compute_s + plan.time.waiting_s,
        "within nodes": plan.time.in_node_s,
        "across nodes": plan.time.cross_node_s,
    }
    left, right, row = 110, 90, 30
    scale = (PAGE_WIDTH - left - right) / max(max(times.values()), 1e-12)
    drawing = Drawing(PAGE_WIDTH, row * len(times), "What bounds the time of a step")
    for index, (name, value) in enumerate(times.items()):
        drawing.text(left - 10, index * row + 16, name, anchor="end")
        drawing.rectangle(left, index * row + 2, value * scale, row - 10, f"c{index}", f"{name}: {seconds(value)}")
        if name == "arithmetic" and plan.time.waiting_s > 0:
            start, waiting = left + plan.time.compute_s * scale, plan.time.waiting_s
            drawing.rectangle(start, 2, waiting * scale, row - 10, "c3", f"waiting for exchanges: {seconds(waiting)}")
        drawing.text(left + value * scale + 8, index * row + 16, seconds(value))
    yield f"<figure>{drawing.svg()}</figure>"
    for line in time_lines(plan):
        yield f"<p>{escape(line)}</p>"


def _ranking(plan: Plan, advice: Advice) -> Iterator[str]:
    if len(advice.ranked) < 2:
        return
    yield f"<h2>Every layout of {plan.layout.world_size} GPUs</h2>"
    yield '<p class="soft">Those that fit, by the tokens per second of all GPUs together; then the others.</p>'
    rows = []
    for other in advice.ranked:
        layout = other.layout
        style = "this" if layout == plan.layout else "" if other.fits else "off"
        notes = notes_on(other)
        if layout == plan.layout:
            notes.append("this plan")
        rows.append(
            f'<tr class="{style}"><td>{layout.shard_degree}</td><td>{layout.num_replicas}</td>'
            f"<td>{layout.tensor_parallel_degree}</td><td>{layout.context_parallel_degree}</td>"
            f"<td>{gib(other.peak.total_bytes)}</td>"
            f"<td>{seconds(other.time.step_s)}</td><td>{other.tokens_per_second:,.0f}</td>"
            f'<td class="left">{escape(other.time.bound_by)}</td><td class="left wide">{", ".join(notes)}</td></tr>'
        )
    yield _table(
        (
            "shard degree",
            "replicas",
            "tensor degree",
            "context degree",
            "GiB per GPU",
            "step",
            "tokens/s",
            "bound by|left",
            "|left",
        ),
        rows,
    )


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    """Columns are titles, with the class of their cells after a bar."""
    heads = "".join(
        f'<th class="{style}">{escape(name)}</th>' for name, _, style in (column.partition("|") for column in columns)
    )
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'
