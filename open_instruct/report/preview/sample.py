"""The first rows of a run, built as the run builds them, then split into tokens and shown: in the
terminal, or as one HTML file without a script, for which nothing is fetched.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.records import Document
from open_instruct.core.text import counted, escaped, pages_in
from open_instruct.data.chat import ChatFormat
from open_instruct.data.eval_split import Side
from open_instruct.data.files.foreign_json import shorten_value
from open_instruct.data.files.rows import RowSource
from open_instruct.data.mixer import MixerEntry, find_entries
from open_instruct.data.prompts import PromptBuilder, build_row_settings
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.hf.head_kinds import check_head
from open_instruct.models.hf.hf_config import config_fields
from open_instruct.objectives.objective import Objective

LEARNED_STYLE = "bold green"
BAR_WIDTH = 40
MOST_BARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, or a few that only together are characters:

    `Token(text="é", ids=(195, 169), is_learned=True)`.
    """

    text: str
    ids: tuple[int, ...]
    is_learned: bool


class ShownDocument(NamedTuple):
    """One document of a row;

    `title` says which, where there are several, and then the first alone shows the prompt.
    """

    title: str
    whole: Document
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row, its place among those read (from 1), and what goes with it:

    `note="judged by gsm8k: \\"42\\""`.
    """

    place: int
    documents: tuple[ShownDocument, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The rows and counts of a preview.

    `lengths` are the tokens of every document that was read, `learned` those of them that are
    learned, and `limit_flag` says how long a document may be. `refusal` is the message with which a
    run would refuse these rows.
    """

    template: str
    rows: tuple[ShownRow, ...]
    lengths: tuple[int, ...]
    learned: tuple[int, ...]
    limit_flag: str
    report: DataReport
    refusal: InputError | None


def sample_of(
    config: LearnerConfig,
    objective: Objective,
    known: dict[str, Any],
    *,
    num_read: int,
    num_shown: int,
) -> Sample:
    """Read and build rows under a run's flags; `known` are verifiers and environments by name.

    Raises:
        InputError: a file, the tokenizer or the template will not do, or no row can be used.
    """
    flag = "dataset_mixer_list" if isinstance(config, GRPOConfig) else "mixer_list"
    opened = open_sources(config, flag)
    folder = Path(config.model.model_name_or_path).expanduser()
    if (folder / "config.json").is_file():
        fields = config_fields(folder)  # which refuses a model that the run would refuse
        check_head(fields["model_type"], objective.choose_head(config))
    tokenizer, chat = open_chat(config)
    builder = builder_of_run(config, objective, chat, known)
    share, seed = config.data.eval_split, config.optim.seed
    side = None if share is None else Side(share=share, is_held_out=False)
    arrays, report = build_rows(
        builder, opened, num_read=num_read, seed=seed, side=side, of_part_too=True
    )
    if share is not None:  # a run refuses a share that holds out none
        held_out = Side(share=share, is_held_out=True)
        build_rows(
            builder_of_run(config, objective, chat, known),
            opened,
            num_read=num_read,
            seed=seed,
            side=held_out,
        )
    dataset = TokenDataset(
        documents_per_row=builder.documents_per_row, reads_ends=builder.reads_ends, **arrays
    )
    documents = [document for row in range(len(dataset)) for document in dataset[row]]
    chosen = np.unique(
        np.linspace(0, len(dataset) - 1, num=min(num_shown, len(dataset))).round().astype(int)
    )
    return Sample(
        template=chat.template.name,
        rows=tuple(_shown(dataset, int(row), builder.document_titles, tokenizer) for row in chosen),
        lengths=tuple(map(len, documents)),
        learned=tuple(document.num_label_tokens for document in documents),
        limit_flag=builder.describe_limit(),
        report=report,
        refusal=builder.bad_rows_error(report.num_rows)
        if report.bad and config.data.on_bad_row == "error"
        else None,
    )


def open_chat(config: LearnerConfig) -> tuple[PreTrainedTokenizerFast, ChatFormat]:
    """The tokenizer of a run, and its chat template.

    Raises:
        InputError: one of them will not do.
    """
    name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    tokenizer = load_tokenizer(name, revision=config.model.revision_of_tokenizer)
    data = config.data
    return tokenizer, ChatFormat.choose(tokenizer, data.chat_template_name, add_bos=data.add_bos)


Opened = Sequence[tuple[MixerEntry, RowSource]]


def open_sources(config: LearnerConfig, flag: str) -> Opened:
    """The data sets of the mixer list `flag`, and their rows.

    Raises:
        InputError: one of them cannot be read.
    """
    return [(entry, entry.open(config.data.columns)) for entry in find_entries(config.data, flag)]


def build_rows(
    builder: RowBuilder,
    opened: Opened,
    *,
    num_read: int,
    seed: int,
    side: Side | None = None,
    of_part_too: bool = False,
) -> tuple[dict[str, np.ndarray], DataReport]:
    """Build the first `num_read` rows of each data set: arrays of a `TokenDataset`, and a report.

    Args:
        side: of `--eval_split`; whether it has any rows shows only where all of them are read, so
            otherwise it is not looked at.
        of_part_too: give the rows of that side also where a part of them is read.

    Raises:
        InputError: no row can be used, or none of that part is on the side.
    """
    taken = [entry.count(len(source)) for entry, source in opened]
    entries = [  # the first rows of a large data set; the run takes them too
        entry if count <= num_read else replace(entry, amount=num_read)
        for (entry, _), count in zip(opened, taken, strict=True)
    ]
    sources = [source for _, source in opened]
    is_whole = max(taken) <= num_read
    if not is_whole and not of_part_too:
        side = None
    try:
        return builder.build(entries, sources, seed=seed, side=side)
    except InputError as error:
        if is_whole or error.flag != "eval_split":
            raise
        raise InputError(
            f"all of the first {num_read:,} rows are held out by --eval_split; give a larger "
            "--read to see others",
            kind="out_of_range",
            flag="read",
        ) from error


def builder_of_run(
    config: LearnerConfig, objective: Objective, chat: ChatFormat, known: dict[str, Any]
) -> RowBuilder:
    """The run's builder, which counts bad rows whatever --on_bad_row is, to show good ones."""
    if isinstance(config, GRPOConfig):
        most = config.data.max_prompt_token_length
        return PromptBuilder(
            chat,
            max_prompt_token_length=most,
            on_bad_row="skip",
            **known,
            **build_row_settings(config),
        )
    builder_of: Callable[..., RowBuilder] = objective.choose_rows(config)
    own: Any = objective.row_arguments(config)
    return builder_of(chat, max_seq_length=config.data.max_seq_length, on_bad_row="skip", **own)


def _shown(
    dataset: TokenDataset, row: int, titles: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> ShownRow:
    documents = dataset[row]
    # Behind the prompt, shown once.
    starts = [0, *(document.responses[0].start for document in documents[1:])]
    return ShownRow(
        place=row + 1,
        documents=tuple(
            ShownDocument(title, document, tuple(_tokens(document, tokenizer, start=start)))
            for title, document, start in zip(titles, documents, starts, strict=True)
        ),
        note=_note(dataset, row),
    )


def _note(dataset: TokenDataset, row: int) -> str:
    details = dataset.details(row)
    if details.startswith(b"{"):
        told = json.loads(details)
        notes = [
            f"judged by {check['verifier']}: {shorten_value(check['ground_truth'])}"
            for check in told["checks"]
        ]
        return "; ".join(
            [f"answered by {told['environment']}", *notes] if "environment" in told else notes
        )
    values = dataset.values(row).tolist()
    return f"given to the loss: {', '.join(f'{value:g}' for value in values)}" if values else ""


def _tokens(
    document: Document, tokenizer: PreTrainedTokenizerFast, *, start: int
) -> Iterator[Token]:
    """The document from token `start` on."""
    learned = [False] * len(document)
    for span in document.responses:
        first = span.stop - 1 if document.reads_ends else span.start
        learned[first : span.stop] = [True] * (span.stop - first)
    held: list[int] = []
    for at in range(start, len(document)):
        held.append(document.token_ids[at])
        text = tokenizer.backend_tokenizer.decode(held, skip_special_tokens=False)
        # What no character needs more tokens for; at the latest where learning begins or ends.
        if not text.endswith("\ufffd") or learned[at : at + 1] != learned[at + 1 : at + 2]:
            yield Token(text=text, ids=tuple(held), is_learned=learned[at])
            held = []


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
            numbers = (
                f"{counted(len(document.whole), 'token')}, {document.whole.num_label_tokens:,} "
                "learned"
            )
            console.print(Text(f"{title}{numbers}", style="dim"))
            console.print(_text_of(document, is_plain=not console.is_terminal))
        if row.note:
            console.print(Text(escaped(row.note), style="cyan"))
    for line in (*_length_lines(sample), *sample.report.lines()):
        console.print(escaped(line, "\n\t"), markup=False)


def html_page(sample: Sample, *, title: str) -> str:
    """The whole file."""
    page = pages_in(Path(__file__).parent, autoescape=True, trim_blocks=True).get_template(
        "page.html.jinja"
    )
    return page.render(sample=sample, title=title, bars=bars_of(sample.lengths), summary=_summary)


def _text_of(document: ShownDocument, *, is_plain: bool) -> Text:
    """The text of a document, without control characters; what is learned is set apart."""
    text = Text()
    for is_learned, tokens in groupby(document.tokens, key=attrgetter("is_learned")):
        shown = escaped("".join(token.text for token in tokens), "\n\t").replace("\n", "⏎\n")
        if is_learned:
            text.append(f"⟦{shown}⟧" if is_plain else shown, style=LEARNED_STYLE)
        else:
            text.append(shown)
    return text


def _length_lines(sample: Sample) -> Iterator[str]:
    yield (
        f"\ntokens of {counted(len(sample.lengths), 'document')} ({_summary(sample.lengths)}; "
        f"{sample.limit_flag})"
    )
    bars = bars_of(sample.lengths)
    width = len(f"{max(bars):,}")
    for first, count in bars.items():
        drawn = "█" * round(BAR_WIDTH * count / max(bars.values())) or ("▏" if count else "")
        yield f"  from {first:>{width},}  {drawn} {count:,}"
    if any(sample.learned):
        yield f"learned of each: {_summary(sample.learned)}"


def _summary(lengths: Sequence[int]) -> str:
    """`median 120, 90% up to 310, longest 512`."""
    median, high = np.percentile(lengths, [50, 90], method="lower")
    return f"median {median:,}, 90% up to {high:,}, longest {max(lengths):,}"


def bars_of(lengths: Sequence[int]) -> dict[int, int]:
    """The number of documents in each of a few bars of equal width, by the bar's least length."""
    low = min(lengths)
    width = max(1, -(-(max(lengths) - low + 1) // MOST_BARS))
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return {low + index * width: int(count) for index, count in enumerate(counts)}
