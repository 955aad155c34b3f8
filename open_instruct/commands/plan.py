"""`open-instruct plan`: what a run would need, before any GPU is taken."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from open_instruct.core.files import write_asked
from open_instruct.planning import shown
from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import plan_of
from open_instruct.planning.request import parse_request
from open_instruct.report.plan_page import html_page, print_plan


def main(argv: Sequence[str]) -> int:
    """Plan what the words after the command describe and print it.

    Returns:
        The exit code, 0 also where the run does not fit: the plan is made.

    Raises:
        InputError: a flag, the model or the GPU will not do, or the page cannot be written.
    """
    request = parse_request(argv)
    plan = plan_of(request.setting)
    advice = Advice(plan)
    for warning in request.warnings:
        print(f"open-instruct plan: warning: {warning}", file=sys.stderr)
    if (file := request.asked.html) is not None:
        write_asked(file, html_page(plan, advice), flag="--html")
    if request.asked.json:
        print(json.dumps(shown.as_record(plan, advice), indent=2))
    else:
        print_plan(plan, advice, Console(file=sys.stdout), is_short=not request.asked.all)
    return 0
