"""Prompts, tokenised once and kept as flat arrays.

Legend for array names: N prompts of the data set, T tokens, C bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from open_instruct.data.chat import ChatFormat
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.parallel.wording import counted
from open_instruct.records import Check, Prompt
from open_instruct.verifiers.verifier import Verifier


class PromptDataset(TokenDataset[Prompt]):
    """Tokenised prompts in mixture order; see `TokenDataset` for what all data sets have.

    Attributes:
        token_ids_T: int32; each distinct prompt as an engine is given it, up to where the reply starts.
        details_C: uint8; of each distinct prompt, its text and its checks as JSON.
        bounds_N4: int64; where prompt n starts and stops in `token_ids_T`, and in `details_C`. Repeated rows share
            both.
    """

    def __init__(
        self, *, token_ids_T: np.ndarray, details_C: np.ndarray, bounds_N4: np.ndarray, keys_N32: np.ndarray
    ) -> None:
        self.details_C = details_C
        self.bounds_N4 = bounds_N4
        super().__init__(token_ids_T=token_ids_T, keys_N32=keys_N32, num_tokens=bounds_N4[:, 1] - bounds_N4[:, 0])

    def __getitem__(self, index: int) -> Prompt:
        row_id = range(len(self))[index]
        start, stop, details_start, details_stop = self.bounds_N4[row_id].tolist()
        details = json.loads(self.details_C[details_start:details_stop].tobytes())
        return Prompt(
            row_id=row_id,
            token_ids=tuple(self.token_ids_T[start:stop].tolist()),
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

    def arrays(self, order_N: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        details_N2 = np.stack([self.details_edges[:-1], self.details_edges[1:]], axis=1)
        bounds_N4 = np.concatenate([np.array(self.edges, dtype=np.int64), details_N2], axis=1)[order_N]
        details_C = np.frombuffer(bytes(self.details), dtype=np.uint8)
        return {"details_C": details_C, "bounds_N4": bounds_N4}, int((bounds_N4[:, 1] - bounds_N4[:, 0]).sum())

    def limit(self) -> str:
        return f"--max_prompt_token_length {self.max_seq_length - 1}"

    def remedy(self) -> str:
        return f"raise it: the shortest prompt has {counted(self.shortest_prompt or 0, 'token')}"


def load_prompt_dataset(
    *, known_verifiers: Mapping[str, Verifier] | None, flag: str = "--dataset_mixer_list", **arguments: Any
) -> tuple[PromptDataset, DataReport]:
    """`load_token_dataset` with `max_prompt_token_length`, and what may judge an answer (None: any verifier will do).

    Raises:
        InputError: see there; a row that names none of `known_verifiers`, or one that refuses its ground truth, is
            malformed.
    """
    builder_of = partial(PromptBuilder, known_verifiers=known_verifiers)
    names = None if known_verifiers is None else sorted(known_verifiers)
    return load_token_dataset(PromptDataset, builder_of, flag=flag, facts={"names_of_verifiers": names}, **arguments)
