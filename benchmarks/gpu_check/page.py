"""The report as one HTML file, from page.html.jinja: no script, nothing fetched."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def html_page(report: Mapping[str, Any]) -> str:
    """The whole file;

    `report` is that of gpu_check.json, of which some checks may be still to come.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["shown"] = shown
    counts = Counter(check["state"] for check in report["checks"])
    return pages.get_template("page.html.jinja").render(
        report=report,
        verdict=", ".join(f"{count} {state}" for state, count in counts.items()),
        has_failed=counts["failed"] > 0,
        num_to_come=report["num_checks"] - len(report["checks"]),
        columns=columns,
    )


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """The names of all columns, in the order in which they are first met."""
    return list(dict.fromkeys(name for row in rows for name in row))


def shown(value: object) -> str:
    """A figure as it is read: four digits that count; nothing where there is none."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
