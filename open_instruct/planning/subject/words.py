"""The sentences of a plan, from words.txt.jinja."""

from pathlib import Path
from typing import Any

from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.subject import units
from open_instruct.wording import counted, macro_text

WORDS = Path(__file__).with_name("words.txt.jinja")


def said(what: str, subject: Any) -> list[str]:
    """The paragraphs of a macro: "advice" of an `Advice`, any other of a `Plan`."""
    text = macro_text(WORDS, what, subject, counted=counted, nodes_text=nodes_text, units=units)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph]
