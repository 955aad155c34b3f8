"""A preview in the terminal: what is learned in colour; where there is none, between ⟦ and ⟧."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from open_instruct.preview.lengths import bars_of, summary
from open_instruct.preview.sample import Sample, ShownDocument
from open_instruct.wording import counted, escaped

LEARNED_STYLE = "bold green"
BAR_WIDTH = 40


def print_sample(sample: Sample, console: Console) -> None:
    """Print rows, then lengths, then what became of all rows."""
    learned = "in colour" if console.is_terminal else "between ⟦ and ⟧"
    legend = f"chat template: {sample.template}; what is learned is {learned}, a line's end is ⏎"
    console.print(legend, markup=False)
    for row in sample.rows:
        console.print(Text(f"\nrow {row.place} of {sample.report.num_pairs}", style="bold"))
        for document in row.documents:
            title = f"{document.title}: " if document.title else ""
            numbers = f"{counted(document.num_tokens, 'token')}, {document.num_learned:,} learned"
            console.print(Text(f"{title}{numbers}", style="dim"))
            console.print(shown_text(document, is_plain=not console.is_terminal))
        if row.note:
            console.print(Text(escaped(row.note), style="cyan"))
    for line in _length_lines(sample):
        console.print(line, markup=False)
    for line in sample.report.lines():
        console.print(escaped(line, "\n\t"), markup=False)


def shown_text(document: ShownDocument, *, is_plain: bool) -> Text:
    """The text of a document, with what is learned set apart."""
    text = Text()
    for is_learned, tokens in groupby(document.tokens, key=lambda token: token.is_learned):
        piece = visible("".join(token.text for token in tokens))
        text.append(f"⟦{piece}⟧" if is_learned and is_plain else piece, style=LEARNED_STYLE if is_learned else "")
    return text


def visible(text: str) -> str:
    """Text with visible line ends and without control characters."""
    return escaped(text, "\n\t").replace("\n", "⏎\n")


def _length_lines(sample: Sample) -> Iterator[str]:
    yield f"\ntokens of {counted(len(sample.lengths), 'document')} ({summary(sample.lengths)}; {sample.limit_flag})"
    bars = bars_of(sample.lengths)
    width = len(f"{bars[-1].last:,}")
    for bar in bars:
        drawn = "█" * round(bar.share * BAR_WIDTH) or ("▏" if bar.count else "")
        yield f"  from {bar.first:>{width},}  {drawn} {bar.count:,}"
    if any(sample.learned):
        yield f"learned of each: {summary(sample.learned)}"
