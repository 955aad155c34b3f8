"""`open-instruct plan`: what a run would need, before any GPU is taken; printed, or as a page of plan.html.jinja."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.plan import PlanFlags
from open_instruct.objectives.registry import objective_names
from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import Plan, plan_of
from open_instruct.planning.request import parse_request
from open_instruct.planning.shown import summary
from open_instruct.planning.shown.json_record import as_record
from open_instruct.planning.shown.terminal import print_plan
from open_instruct.planning.subject.words import said
from open_instruct.report.templates import nodes_drawn, rendered
from open_instruct.whole_file import write_asked


def main(argv: Sequence[str]) -> int:
    """Plan what the words after the command describe and print it.

    Returns:
        The exit code, 0 also where the run does not fit: the plan is made.

    Raises:
        InputError: a flag, the model or the GPU will not do, or the page cannot be written.
    """
    if asks_for_help(argv):
        usage = f"{'|'.join(objective_names())} [FILE.yaml] --model_name_or_path STR --gpus_per_node N ..."
        print_help(PlanFlags, "open-instruct plan", usage)
        return 0
    request = parse_request(argv)
    plan = plan_of(request.setting)
    advice = Advice(plan)
    for warning in request.warnings:
        print(f"open-instruct plan: warning: {warning}", file=sys.stderr)
    if (file := request.asked.html) is not None:
        write_asked(file, html_page(plan, advice), flag="--html")
    if request.asked.json:
        print(json.dumps(as_record(plan, advice), indent=2))
    else:
        print_plan(plan, advice, Console(file=sys.stdout))
    return 0


def html_page(plan: Plan, advice: Advice) -> str:
    """The plan as one HTML file with tables and drawings; it has no script and fetches nothing."""
    layout = plan.layout
    bars = [
        {"name": phase.name, "total_bytes": phase.total_bytes, "parts": summary.parts_of(phase, plan)}
        for phase in plan.phases
    ]
    nodes = list(nodes_drawn(layout.gpus_per_node, layout.shard_groups))
    return rendered("plan.html.jinja", plan=plan, advice=advice, said=said, summary=summary, bars=bars, nodes=nodes)
