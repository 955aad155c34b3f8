"""Program that renders a chat template in a process of its own; `template_trial` starts it.

It reads one JSON object from stdin, and imports nothing but Jinja. What it is given is set up as
transformers sets a template up; the text that comes out is thrown away. Its own CPU time is
limited, by a signal that ends it also within a single operation.
"""

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

STARTED = "rendering"
DAY = datetime(2024, 7, 26)  # any: a date changes no loop


class GenerationBlocks(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which writes what stands inside."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: str) -> None:
    raise TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def build_environment() -> Environment:
    """Jinja with what transformers adds to it for templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = DAY.strftime
    return environment


def render(text: str, renderings: list[dict[str, Any]]) -> None:
    """Compile a template, and write it with each of these sets of variables."""
    template = build_environment().from_string(text)
    for variables in renderings:
        with suppress(Exception):  # whoever renders it next meets it too, and tells the user
            template.render(variables)


def main() -> None:
    request = json.load(sys.stdin)
    print(STARTED, flush=True)
    signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
    with suppress(Exception):  # of a template that does not compile
        render(request["text"], request["renderings"])


if __name__ == "__main__":
    main()
