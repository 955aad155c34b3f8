"""A preview as one HTML file: no script, nothing fetched."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from open_instruct.preview.lengths import bars_of, summary
from open_instruct.preview.sample import Sample, Token
from open_instruct.wording import counted


def html_page(sample: Sample, *, title: str) -> str:
    """The whole file."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    pages.filters |= {"counted": counted, "pieces": _pieces}
    return pages.get_template("page.html.jinja").render(
        sample=sample, title=title, bars=bars_of(sample.lengths), summary=summary
    )


def _pieces(tokens: tuple[Token, ...]) -> list[tuple[bool, list[Token]]]:
    """Tokens in runs that are learned, or are not."""
    return [(is_learned, list(run)) for is_learned, run in groupby(tokens, key=lambda token: token.is_learned)]
