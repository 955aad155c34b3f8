"""The spelling of numbers and choices for people, the templates of pages, and text from others,
read and shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

# Characters that steer a terminal or turn the order of letters, and those without a form in UTF-8.
_STEERS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def join_choices(values: Iterable[object]) -> str:
    """Values as a choice: `[1, 2, 4]` is "1, 2 or 4"."""
    words = [str(value) for value in values]
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def spell_count(count: int, noun: str) -> str:
    """Spell a number with its noun, as in "1 node", "2,000 nodes" or "2 copies"."""
    if count == 1:
        return f"1 {noun}"
    plural = f"{noun}s"
    if noun.endswith("y"):
        plural = f"{noun[:-1]}ies"
    elif noun.endswith(("ch", "ss")):
        plural = f"{noun}es"
    return f"{count:,} {plural}"


def open_templates(folder: Path, **options: Any) -> Environment:
    """The templates in a folder, which refuse names that they are not given.

    `options` are jinja2's.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, **options)
    pages.filters |= {"counted": spell_count, "thousands": "{:,.0f}".format}
    return pages


def macro_text(
    template: Path,
    macro: str,
    *facts: object,
    **names: object,
) -> str:
    """The text of a macro of a template, for these facts.

    `names` are what all macros of the template know.
    """
    return str(getattr(_macros(template, **names), macro)(*facts)).removesuffix("\n")


@cache
def _macros(template: Path, **names: object) -> Any:
    """The macros of a template, compiled once."""
    pages = open_templates(template.parent, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= names
    return pages.get_template(template.name).module


def escape_controls(text: str, kept_controls: str = "") -> str:
    """Escape the characters of a model's or a file's words that would steer a terminal, but for
    `kept_controls`.
    """
    return _STEERS.sub(
        lambda match: match[0] if match[0] in kept_controls else ascii(match[0])[1:-1], text
    )


def json_or_text(value: Any) -> Any:
    """A text that is JSON as what it says; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
