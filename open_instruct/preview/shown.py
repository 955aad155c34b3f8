"""A preview in the terminal, or as one HTML file without a script, for which nothing is fetched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from open_instruct.preview.sample import Sample, ShownDocument
from open_instruct.wording import counted, escaped, pages_in

LEARNED_STYLE = "bold green"
BAR_WIDTH = 40


def print_sample(sample: Sample, console: Console) -> None:
    """Print rows, then lengths, then what became of all rows.

    What is learned is in colour; where there is none, between ⟦ and ⟧.
    """
    learned = "in colour" if console.is_terminal else "between ⟦ and ⟧"
    legend = f"chat template: {sample.template}; what is learned is {learned}, a line's end is ⏎"
    console.print(legend, markup=False)
    for row in sample.rows:
        console.print(Text(f"\nrow {row.place} of {sample.report.num_pairs}", style="bold"))
        for document in row.documents:
            title = f"{document.title}: " if document.title else ""
            numbers = f"{counted(document.num_tokens, 'token')}, {document.num_learned:,} learned"
            console.print(Text(f"{title}{numbers}", style="dim"))
            console.print(_text_of(document, is_plain=not console.is_terminal))
        if row.note:
            console.print(Text(escaped(row.note), style="cyan"))
    for line in (*_length_lines(sample), *sample.report.lines()):
        console.print(escaped(line, "\n\t"), markup=False)


def html_page(sample: Sample, *, title: str) -> str:
    """The whole file."""
    page = pages_in(Path(__file__).parent, autoescape=True, trim_blocks=True).get_template("page.html.jinja")
    return page.render(sample=sample, title=title, bars=bars_of(sample.lengths), summary=_summary)


def _text_of(document: ShownDocument, *, is_plain: bool) -> Text:
    """The text of a document, with visible line ends and without control characters; what is learned is set apart."""
    text = Text()
    for piece in document.pieces:
        shown = escaped("".join(token.text for token in piece.tokens), "\n\t").replace("\n", "⏎\n")
        if piece.is_learned:
            text.append(f"⟦{shown}⟧" if is_plain else shown, style=LEARNED_STYLE)
        else:
            text.append(shown)
    return text


def _length_lines(sample: Sample) -> Iterator[str]:
    yield f"\ntokens of {counted(len(sample.lengths), 'document')} ({_summary(sample.lengths)}; {sample.limit_flag})"
    bars = bars_of(sample.lengths)
    width = len(f"{bars[-1].last:,}")
    for bar in bars:
        drawn = "█" * round(bar.share * BAR_WIDTH) or ("▏" if bar.count else "")
        yield f"  from {bar.first:>{width},}  {drawn} {bar.count:,}"
    if any(sample.learned):
        yield f"learned of each: {_summary(sample.learned)}"


def _summary(lengths: Sequence[int]) -> str:
    """`median 120, 90% up to 310, longest 512`."""
    median, high = np.percentile(lengths, [50, 90], method="lower")
    return f"median {median:,}, 90% up to {high:,}, longest {max(lengths):,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How many documents have from `first` to `last` tokens: `Bar(first=0, last=49, count=12, share=0.4)`.

    `share` is that of the highest bar.
    """

    first: int
    last: int
    count: int
    share: float


def bars_of(lengths: Sequence[int], *, num_bars: int = 16) -> list[Bar]:
    """Bars of one width from the shortest to the longest."""
    low = min(lengths)
    width = max(1, -(-(max(lengths) - low + 1) // num_bars))
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return [
        Bar(first=low + index * width, last=low + (index + 1) * width - 1, count=int(count), share=count / counts.max())
        for index, count in enumerate(counts)
    ]
