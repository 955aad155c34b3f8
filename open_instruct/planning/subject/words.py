"""The sentences of a plan, from words.txt.jinja."""

from functools import cache
from pathlib import Path
from typing import Any

from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.subject import units
from open_instruct.wording import counted, pages_in


def said(what: str, subject: Any) -> list[str]:
    """The paragraphs of a macro: "advice" of an `Advice`, any other of a `Plan`."""
    text = getattr(_macros(), what)(subject)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph]


@cache
def _macros() -> Any:
    pages = pages_in(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= {"counted": counted, "nodes_text": nodes_text, "units": units}
    return pages.get_template("words.txt.jinja").module
