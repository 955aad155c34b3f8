"""Shows the first rows of a run as the run builds them, token by token.

They are shown in the terminal, or as one HTML file that has no script and fetches nothing.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.sections import DataSection, ModelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.records import Document
from open_instruct.core.text import escape_controls, open_templates, spell_count
from open_instruct.data.chat import ChatFormat
from open_instruct.data.eval_split import Side
from open_instruct.data.files.foreign_json import shorten_value
from open_instruct.data.files.rows import RowSource
from open_instruct.data.mixer import MixerEntry, find_entries
from open_instruct.data.prompts import PromptBuilder, build_row_settings
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.token_dataset import TokenDataset, make_token_dataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.hf.head_kinds import check_head
from open_instruct.models.model_folder import (
    find_config_file,
    find_tokenizer_name,
    read_model_fields,
)
from open_instruct.objectives.objective import Objective

LEARNED_STYLE = "bold green"
BAR_WIDTH = 40
MAX_BARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, or a few that only together are characters.

    Example: `Token(text="é", ids=(195, 169), is_learned=True)`.
    """

    text: str
    ids: tuple[int, ...]
    is_learned: bool


class ShownDocument(NamedTuple):
    """One document of a row.

    `title` says which, where there are several, and then the first alone shows the prompt.
    """

    title: str
    whole: Document
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row, its place among those read (from 1), and a note on what goes with it.

    Example of a note: `judged by gsm8k: "42"`.
    """

    place: int
    documents: tuple[ShownDocument, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The rows and counts of a preview.

    `lengths` are the tokens of every document that was read, `learned` the learned ones among them,
    and `limit_flag` says how long a document may be. `refusal` is the message with which a run
    would refuse these rows.
    """

    template: str
    rows: tuple[ShownRow, ...]
    lengths: tuple[int, ...]
    learned: tuple[int, ...]
    limit_flag: str
    report: DataReport
    refusal: InputError | None


def build_sample(
    config: LearnerConfig,
    objective: Objective,
    judges: dict[str, Any],
    *,
    num_read: int,
    num_shown: int,
) -> Sample:
    """Read and build rows under a run's flags; `judges` are verifiers and environments by name.

    Raises:
        InputError: a file, the tokenizer or the template will not do, or no row can be used.
    """
    flag = "dataset_mixer_list" if isinstance(config, GRPOConfig) else "mixer_list"
    sources = open_sources(config.data, flag)
    _check_model(config, objective)
    tokenizer, chat = open_chat(config.model, config.data)
    builder = make_row_builder(config, objective, chat, judges)
    arrays, report = _build_training_rows(config, builder, sources, num_read=num_read)
    if config.data.eval_split is not None:
        # A run refuses a share that holds out no row.
        side = Side(share=config.data.eval_split, is_held_out=True)
        other = make_row_builder(config, objective, chat, judges)
        build_rows(other, sources, num_read=num_read, seed=config.optim.seed, side=side)
    dataset = make_token_dataset(builder, arrays, [source for _, source in sources])
    num_rows = len(dataset)
    documents = list(chain.from_iterable(dataset[row] for row in range(num_rows)))
    row_indices = np.linspace(0, num_rows - 1, num=min(num_shown, num_rows)).round().astype(int)
    titles = builder.document_titles
    refusal = None
    if report.bad and config.data.on_bad_row == "error":
        refusal = builder.bad_rows_error(report.num_rows)
    return Sample(
        template=chat.template.name,
        rows=tuple(
            _show_row(dataset, int(row), titles, tokenizer) for row in np.unique(row_indices)
        ),
        lengths=tuple(map(len, documents)),
        learned=tuple(document.num_label_tokens for document in documents),
        limit_flag=builder.describe_limit(),
        report=report,
        refusal=refusal,
    )


def _check_model(config: LearnerConfig, objective: Objective) -> None:
    """:raises InputError: the model's folder holds one that the run would refuse."""
    folder = Path(config.model.config_path).expanduser()
    if find_config_file(folder).is_file():
        fields = read_model_fields(folder)
        check_head(fields["model_type"], objective.choose_head(config))


def _build_training_rows(
    config: LearnerConfig,
    builder: RowBuilder,
    sources: "Sources",
    *,
    num_read: int,
) -> tuple[dict[str, np.ndarray], DataReport]:
    share = config.data.eval_split
    side = None
    if share is not None:
        side = Side(share=share, is_held_out=False)
    return build_rows(
        builder,
        sources,
        num_read=num_read,
        seed=config.optim.seed,
        side=side,
        splits_parts=True,
    )


def open_chat(
    model: ModelSection, data: DataSection | PromptDataSection
) -> tuple[PreTrainedTokenizerFast, ChatFormat]:
    """The tokenizer of a run, and its chat template.

    Raises:
        InputError: one of them will not do.
    """
    name = find_tokenizer_name(model)
    tokenizer = load_tokenizer(name, revision=model.revision_of_tokenizer)
    return tokenizer, ChatFormat.from_flags(tokenizer, data)


Sources = Sequence[tuple[MixerEntry, RowSource]]


def open_sources(data: DataSection | PromptDataSection, flag: str) -> Sources:
    """The data sets of the mixer list `flag`, and their rows.

    Raises:
        InputError: one of them cannot be read.
    """
    return [(entry, entry.open(data.columns)) for entry in find_entries(data, flag)]


def build_rows(
    builder: RowBuilder,
    sources: Sources,
    *,
    num_read: int,
    seed: int,
    side: Side | None = None,
    splits_parts: bool = False,
) -> tuple[dict[str, np.ndarray], DataReport]:
    """Build the first `num_read` rows of each data set: arrays of a `TokenDataset`, and a report.

    Args:
        sources: the data sets, see `open_sources`.
        num_read: rows to read of each at most.
        seed: of the run.
        side: the side of `--eval_split` to build. A part of the rows does not show whether the side
            is empty, so that parts are built whole by default.
        splits_parts: build that side alone also where only a part of the rows is read.

    Raises:
        InputError: no row can be used, or none of those that are read is on the side.
    """
    entries = []
    is_whole = True
    for entry, source in sources:
        if entry.count(len(source)) > num_read:
            is_whole = False
            # The first rows of a large data set; the run takes them too.
            entry = replace(entry, amount=num_read)
        entries.append(entry)
    if not is_whole and not splits_parts:
        side = None
    try:
        return builder.build(entries, [source for _, source in sources], seed=seed, side=side)
    except InputError as error:
        if is_whole or error.flag != "eval_split":
            raise
        raise InputError(
            f"all of the first {num_read:,} rows are held out by --eval_split; give a larger "
            "--read to see others",
            kind="out_of_range",
            flag="read",
        ) from error


def make_row_builder(
    config: LearnerConfig,
    objective: Objective,
    chat: ChatFormat,
    judges: dict[str, Any],
) -> RowBuilder:
    """The run's builder, which counts bad rows also where the run stops, to show good ones."""
    on_bad_row = "trim" if config.data.on_bad_row == "trim" else "skip"
    if isinstance(config, GRPOConfig):
        return PromptBuilder(
            chat,
            max_prompt_token_length=config.data.max_prompt_token_length,
            on_bad_row=on_bad_row,
            **judges,
            **build_row_settings(config),
        )
    make: Callable[..., RowBuilder] = objective.choose_rows(config)
    settings: Any = objective.row_arguments(config)
    return make(chat, max_seq_length=config.data.max_seq_length, on_bad_row=on_bad_row, **settings)


def _show_row(
    dataset: TokenDataset,
    row: int,
    titles: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
) -> ShownRow:
    documents: list[ShownDocument] = []
    for title, document in zip(titles, dataset[row], strict=True):
        # The prompt is shown once.
        start = document.responses[0].start if documents else 0
        tokens = tuple(_tokens(document, tokenizer, start=start))
        documents.append(ShownDocument(title, document, tokens))
    return ShownRow(place=row + 1, documents=tuple(documents), note=_describe_values(dataset, row))


def _describe_values(dataset: TokenDataset, row: int) -> str:
    """What goes with a row: its environment and checks, or the numbers for the loss."""
    details = dataset.details(row)
    if not details.startswith(b"{"):
        numbers = ", ".join(f"{value:g}" for value in dataset.values(row).tolist())
        if not numbers:
            return ""
        return f"given to the loss: {numbers}"
    fields = json.loads(details)
    notes = []
    if "environment" in fields:
        notes.append(f"answered by {fields['environment']}")
    for check in fields["checks"]:
        notes.append(f"judged by {check['verifier']}: {shorten_value(check['ground_truth'])}")
    return "; ".join(notes)


def _tokens(
    document: Document, tokenizer: PreTrainedTokenizerFast, *, start: int
) -> Iterator[Token]:
    """The document from token `start` on."""
    learned = [False] * len(document)
    for span in document.responses:
        first = span.stop - 1 if document.reads_ends else span.start
        learned[first : span.stop] = [True] * (span.stop - first)
    ids: list[int] = []
    for at in range(start, len(document)):
        ids.append(document.token_ids[at])
        text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        is_whole = not text.endswith("\ufffd")
        is_last = at + 1 == len(document) or learned[at] != learned[at + 1]
        # A character that is not whole ends at the latest where learning begins or ends.
        if is_whole or is_last:
            yield Token(text=text, ids=tuple(ids), is_learned=learned[at])
            ids = []


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
            num_tokens = spell_count(len(document.whole), "token")
            num_learned = f"{document.whole.num_label_tokens:,} learned"
            console.print(Text(f"{title}{num_tokens}, {num_learned}", style="dim"))
            console.print(_style_document(document, is_plain=not console.is_terminal))
        if row.note:
            console.print(Text(escape_controls(row.note), style="cyan"))
    for line in (*_length_lines(sample), *sample.report.lines()):
        console.print(escape_controls(line, "\n\t"), markup=False)


def html_page(sample: Sample, *, title: str) -> str:
    """The sample as the whole text of an HTML file."""
    pages = open_templates(Path(__file__).parent, autoescape=True, trim_blocks=True)
    page = pages.get_template("page.html.jinja")
    bars = count_by_length(sample.lengths)
    return page.render(
        sample=sample,
        title=title,
        bars=bars,
        summary=_summarize,
    )


def _style_document(document: ShownDocument, *, is_plain: bool) -> Text:
    """The text of a document, without control characters; what is learned is set apart."""
    text = Text()
    for is_learned, tokens in groupby(document.tokens, key=attrgetter("is_learned")):
        piece = escape_controls("".join(token.text for token in tokens), "\n\t").replace(
            "\n", "⏎\n"
        )
        if is_learned and is_plain:
            piece = f"⟦{piece}⟧"
        text.append(piece, style=LEARNED_STYLE if is_learned else None)
    return text


def _length_lines(sample: Sample) -> Iterator[str]:
    documents = spell_count(len(sample.lengths), "document")
    yield f"\ntokens of {documents} ({_summarize(sample.lengths)}; {sample.limit_flag})"
    bars = count_by_length(sample.lengths)
    width = len(f"{max(bars):,}")
    for first, count in bars.items():
        bar = "█" * round(BAR_WIDTH * count / max(bars.values()))
        if count and not bar:
            bar = "▏"
        yield f"  from {first:>{width},}  {bar} {count:,}"
    if any(sample.learned):
        yield f"learned of each: {_summarize(sample.learned)}"


def _summarize(lengths: Sequence[int]) -> str:
    """`median 120, 90% up to 310, longest 512`."""
    median, high = np.percentile(lengths, [50, 90], method="lower")
    return f"median {median:,}, 90% up to {high:,}, longest {max(lengths):,}"


def count_by_length(lengths: Sequence[int]) -> dict[int, int]:
    """The number of documents in each of a few bars of equal width, by the bar's least length."""
    low = min(lengths)
    width = max(1, -(-(max(lengths) - low + 1) // MAX_BARS))
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return {low + index * width: int(count) for index, count in enumerate(counts)}
