"""The first rows of a run, built as the run builds them, then split into tokens to be shown."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.training import LearnerConfig
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.foreign_json import shortened
from open_instruct.data.mixer import entries_of
from open_instruct.data.prompts import PromptBuilder, row_changes
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.errors import InputError
from open_instruct.objectives.objective import Objective
from open_instruct.records import Document
from open_instruct.verifiers.registry import known_verifiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, or a few that only together are characters: `Token(text="é", ids=(195, 169))`."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens in a row that are all learned, or all not."""

    is_learned: bool
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDocument:
    """One document of a row; `title` says which, where there are several, and then the first alone has the prompt."""

    title: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_learned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row, its place among those read (from 1), and what goes with it: `note="judged by gsm8k: \\"42\\""`."""

    place: int
    documents: tuple[ShownDocument, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The rows and counts of a preview.

    `lengths` are the tokens of every document that was read, `learned` those of them that are learned, and
    `limit_flag` says how long a document may be. `refusal` is the message with which a run would refuse these rows.
    """

    template: str
    rows: tuple[ShownRow, ...]
    lengths: tuple[int, ...]
    learned: tuple[int, ...]
    limit_flag: str
    report: DataReport
    refusal: InputError | None


def sample_of(config: LearnerConfig, objective: Objective, *, num_read: int, num_shown: int) -> Sample:
    """Read and build rows under the flags of a run.

    Raises:
        InputError: a file, the tokenizer or the template will not do, or no row can be used.
    """
    data: Any = config.data
    flag = "dataset_mixer_list" if isinstance(config, GRPOConfig) else "mixer_list"
    entries = entries_of(data, flag)
    sources = [entry.open(data.columns) for entry in entries]
    model = config.model
    name = model.tokenizer_name_or_path or model.model_name_or_path
    tokenizer = load_tokenizer(name, revision=model.revision_of_tokenizer)
    chat = ChatFormat.choose(tokenizer, data.chat_template_name, add_bos=data.add_bos)
    builder = _builder(config, objective, chat)
    entries = tuple(  # the first rows of a large data set; the run takes them too
        entry if entry.count(len(source)) <= num_read else replace(entry, amount=num_read)
        for entry, source in zip(entries, sources, strict=True)
    )
    arrays, report = builder.build(entries, sources, seed=config.optim.seed)
    dataset = TokenDataset(documents_per_row=builder.documents_per_row, reads_ends=builder.reads_ends, **arrays)
    documents = [document for row in range(len(dataset)) for document in dataset[row]]
    chosen = np.unique(np.linspace(0, len(dataset) - 1, num=min(num_shown, len(dataset))).round().astype(int))
    return Sample(
        template=chat.template.name,
        rows=tuple(_shown(dataset, int(row), builder.titles, tokenizer) for row in chosen),
        lengths=tuple(map(len, documents)),
        learned=tuple(document.num_label_tokens for document in documents),
        limit_flag=builder.limit(),
        report=report,
        refusal=builder.refusal(report.num_rows) if report.bad and data.on_bad_row == "error" else None,
    )


def _builder(config: LearnerConfig, objective: Objective, chat: ChatFormat) -> RowBuilder:
    """The run's builder, which counts bad rows whatever --on_bad_row is, so that good ones can be shown."""
    if isinstance(config, GRPOConfig):
        return PromptBuilder(
            chat,
            max_prompt_token_length=config.data.max_prompt_token_length,
            on_bad_row="skip",
            known_verifiers=known_verifiers(config.reward),
            **row_changes(config),
        )
    builder_of: Callable[..., RowBuilder] = objective.rows_of(config)  # type: ignore[arg-type]
    own: Any = objective.row_arguments(config)
    return builder_of(chat, max_seq_length=config.data.max_seq_length, on_bad_row="skip", **own)


def _shown(dataset: TokenDataset, row: int, titles: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> ShownRow:
    documents = dataset[row]
    starts = [0, *(document.responses[0].start for document in documents[1:])]  # behind the prompt, shown once
    return ShownRow(
        place=row + 1,
        documents=tuple(
            ShownDocument(
                title=title,
                pieces=tuple(_pieces(document, tokenizer, start=start)),
                num_tokens=len(document),
                num_learned=document.num_label_tokens,
            )
            for title, document, start in zip(titles, documents, starts, strict=True)
        ),
        note=_note(dataset, row),
    )


def _note(dataset: TokenDataset, row: int) -> str:
    details = dataset.details(row)
    if details.startswith(b"{"):
        checks = json.loads(details)["checks"]
        return "judged by " + "; ".join(f"{check['verifier']}: {shortened(check['ground_truth'])}" for check in checks)
    values = dataset.values(row).tolist()
    return f"given to the loss: {', '.join(f'{value:g}' for value in values)}" if values else ""


def _pieces(document: Document, tokenizer: PreTrainedTokenizerFast, *, start: int) -> Iterator[Piece]:
    """The document from token `start` on."""
    learned = [False] * len(document)
    for span in document.responses:
        first = span.stop - 1 if document.reads_ends else span.start
        learned[first : span.stop] = [True] * (span.stop - first)
    places = range(start, len(document))
    for is_learned, piece in groupby(places, key=learned.__getitem__):
        ids = [document.token_ids[at] for at in piece]
        yield Piece(is_learned=is_learned, tokens=tuple(_tokens(ids, tokenizer)))


def _tokens(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> Iterator[Token]:
    held: list[int] = []
    for number, token_id in enumerate(ids, start=1):
        held.append(token_id)
        text = tokenizer.backend_tokenizer.decode(held, skip_special_tokens=False)
        if not text.endswith("\ufffd") or number == len(ids):
            yield Token(text=text, ids=tuple(held))
            held = []
