"""Preference pairs, tokenised once and kept as flat arrays.

Legend for array names: N pairs of the data set, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.records import Document, PreferenceExample, Span


class PreferenceDataset(TokenDataset[PreferenceExample]):
    """Tokenised pairs in mixture order; see `TokenDataset` for what all data sets have.

    Attributes:
        token_ids_T: int32; for each distinct pair its prompt, then the chosen, then the rejected reply.
        bounds_N4: int64; where pair n's prompt starts and stops and its chosen and its rejected reply stop in
            `token_ids_T`. Repeated rows share their tokens.
        prompt_lengths: int64 (N,); tokens of each pair's prompt.
        chosen_response_lengths, rejected_response_lengths: int64 (N,); tokens of each reply alone.
        chosen_lengths, rejected_lengths: int64 (N,); tokens of each conversation, prompt included.
        num_tokens: int64 (N,); their sum, as `PreferenceExample.num_tokens`.
    """

    def __init__(self, *, token_ids_T: np.ndarray, bounds_N4: np.ndarray, keys_N32: np.ndarray) -> None:
        self.prompt_lengths, self.chosen_response_lengths, self.rejected_response_lengths = np.diff(bounds_N4).T
        self.chosen_lengths = self.prompt_lengths + self.chosen_response_lengths
        self.rejected_lengths = self.prompt_lengths + self.rejected_response_lengths
        self.bounds_N4 = bounds_N4
        super().__init__(
            token_ids_T=token_ids_T, keys_N32=keys_N32, num_tokens=self.chosen_lengths + self.rejected_lengths
        )

    def __getitem__(self, index: int) -> PreferenceExample:
        row_id = range(len(self))[index]
        start, prompt_stop, chosen_stop, rejected_stop = self.bounds_N4[row_id].tolist()
        prompt = tuple(self.token_ids_T[start:prompt_stop].tolist())
        return PreferenceExample(
            row_id=row_id,
            key=self.key(row_id),
            chosen=_document(prompt, self.token_ids_T[prompt_stop:chosen_stop]),
            rejected=_document(prompt, self.token_ids_T[chosen_stop:rejected_stop]),
        )


def _document(prompt: tuple[int, ...], reply_ids_T: np.ndarray) -> Document:
    token_ids = (*prompt, *reply_ids_T.tolist())
    return Document(token_ids=token_ids, responses=(Span(start=len(prompt), stop=len(token_ids)),))


class PreferenceBuilder(RowBuilder):
    """The pieces of a pair: the prompt, the chosen reply, the rejected reply."""

    unit = "pair"

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        pair = parse_preference_row(row)
        prompt, replies = self.chat.render(pair.prompt, (pair.chosen, pair.rejected))
        return RenderedRow(texts=(prompt, *replies), replies=(None, pair.chosen, pair.rejected))

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """Replies are cut on the right, prompts never."""
        prompt, chosen, rejected = pieces
        room = self.max_seq_length - len(prompt)
        if chosen[:room] == rejected[:room]:
            self.filtered["same_tokens"] += 1
            return None
        return [prompt, chosen[:room], rejected[:room]]

    def arrays(self, order_N: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        bounds_N4 = np.array(self.edges, dtype=np.int64)[order_N]
        # The prompt is kept once for both conversations of a pair.
        return {"bounds_N4": bounds_N4}, int((bounds_N4[:, 3] + bounds_N4[:, 1] - 2 * bounds_N4[:, 0]).sum())

    def remedy(self) -> str:
        if (self.shortest_prompt or 0) >= self.max_seq_length:
            return super().remedy()
        return "raise --max_seq_length, so that the replies reach the place where they differ"


load_preference_dataset = partial(load_token_dataset, PreferenceDataset, PreferenceBuilder)
