"""Prompts as engines are given them, tokenised once, with what their answers are judged by kept beside the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from open_instruct.data.chat import ChatFormat
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.parallel.wording import counted
from open_instruct.records import Check, Prompt
from open_instruct.verifiers.verifier import Verifier


class Prompts:
    """The rows of a data set of prompts, as `Prompt`s."""

    def __init__(self, dataset: TokenDataset) -> None:
        self.dataset = dataset
        self.num_tokens = dataset.num_tokens
        self.fingerprint = dataset.fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Prompt:
        row_id = range(len(self))[index]
        details = json.loads(self.dataset.details(row_id))
        (document,) = self.dataset[row_id]
        return Prompt(
            row_id=row_id,
            token_ids=document.token_ids,
            text=details["text"],
            checks=tuple(Check(**check) for check in details["checks"]),
        )


class PromptBuilder(RowBuilder):
    """The one piece of a prompt: all that comes before a reply."""

    unit = "prompt"
    too_long = "long_prompt"

    def __init__(
        self,
        chat: ChatFormat,
        *,
        max_prompt_token_length: int,
        on_bad_row: str,
        known_verifiers: Mapping[str, Verifier] | None,
    ) -> None:
        # One token more, the first of a reply.
        super().__init__(chat, max_seq_length=max_prompt_token_length + 1, on_bad_row=on_bad_row)
        self.known_verifiers = known_verifiers

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        parsed = parse_prompt_row(row, self.known_verifiers)
        text, _ = self.chat.render(parsed.messages, ())
        details = json.dumps({"text": text, "checks": list(map(asdict, parsed.checks))})
        return RenderedRow(texts=(text,), replies=(None,), details=details.encode())

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        return pieces

    def limit(self) -> str:
        return f"--max_prompt_token_length {self.max_seq_length - 1}"

    def remedy(self) -> str:
        return f"raise it: the shortest prompt has {counted(self.shortest_prompt or 0, 'token')}"


def load_prompt_dataset(
    *, known_verifiers: Mapping[str, Verifier] | None, flag: str = "--dataset_mixer_list", **arguments: Any
) -> tuple[Prompts, DataReport]:
    """`load_token_dataset` with `max_prompt_token_length`, and what may judge an answer (None: any verifier will do).

    Raises:
        InputError: see there; a row that names none of `known_verifiers`, or one that refuses its ground truth, is
            malformed.
    """
    builder_of = partial(PromptBuilder, known_verifiers=known_verifiers)
    names = None if known_verifiers is None else sorted(known_verifiers)
    dataset, report = load_token_dataset(builder_of, flag=flag, facts={"names_of_verifiers": names}, **arguments)
    return Prompts(dataset), report
