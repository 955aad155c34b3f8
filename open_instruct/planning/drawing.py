"""An SVG drawing of rectangles, lines and words; colours come from the page's style sheet, by class."""

from __future__ import annotations

from html import escape
from typing import Literal


class Drawing:
    """Shapes in the order in which they are added, in pixels from the upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = (width, height)
        self._shapes = [f"<title>{escape(title)}</title>"]

    def rectangle(self, x: float, y: float, width: float, height: float, style: str, tip: str = "") -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" class="{style}">'
            f"{inside}</rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self._shapes.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')

    def text(
        self, x: float, y: float, words: str, *, anchor: Literal["start", "middle", "end"] = "start", style: str = ""
    ) -> None:
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """The drawing as an element of a page."""
        width, height = self._size
        return (
            f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">'
            f"{''.join(self._shapes)}</svg>"
        )
