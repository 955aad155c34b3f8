"""Links of the pages that lead out of docs/, for the site: mkdocs calls it, by mkdocs.yml.

A page links to files of the checkout, such as a configuration. The site has no such files, so it shows
the words of the link, and the path behind them where the mouse rests.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r'<span title="\2">\1</span>', markdown)
