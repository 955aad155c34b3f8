"""Conversations of which every assistant turn is learned, tokenised once and kept as flat arrays.

Legend for array names: N conversations of the data set, T tokens, E edges between pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np

from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.data.sft_rows import parse_sft_row
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.records import Document, Span


class SFTDataset(TokenDataset[Document]):
    """Tokenised conversations in mixture order; see `TokenDataset` for what all data sets have.

    Attributes:
        edges_E: int64; for each distinct conversation, where its pieces (prompt, reply, prompt, reply, ...) start in
            `token_ids_T`, and where the last one stops.
        bounds_N2: int64; where the edges of conversation n start and stop in `edges_E`.
        num_label_tokens: int64 (N,); tokens of the replies of each conversation.
    """

    def __init__(
        self,
        *,
        token_ids_T: np.ndarray,
        edges_E: np.ndarray,
        bounds_N2: np.ndarray,
        num_labels_N: np.ndarray,
        keys_N32: np.ndarray,
    ) -> None:
        self.edges_E = edges_E
        self.bounds_N2 = bounds_N2
        self.num_label_tokens = num_labels_N
        num_tokens = edges_E[bounds_N2[:, 1] - 1] - edges_E[bounds_N2[:, 0]]
        super().__init__(token_ids_T=token_ids_T, keys_N32=keys_N32, num_tokens=num_tokens)

    def __getitem__(self, index: int) -> Document:
        first, stop = self.bounds_N2[range(len(self))[index]].tolist()
        edges = self.edges_E[first:stop].tolist()
        start = edges[0]
        return Document(
            token_ids=tuple(self.token_ids_T[start : edges[-1]].tolist()),
            responses=tuple(
                Span(start=reply_start - start, stop=reply_stop - start)
                for reply_start, reply_stop in zip(edges[1::2], edges[2::2], strict=True)
            ),
        )


class SFTBuilder(RowBuilder):
    """The pieces of a conversation: what is given and what is learned, in turn."""

    unit = "conversation"

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        messages = parse_sft_row(row)
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        return RenderedRow(
            texts=self.chat.render_turns(messages),
            replies=tuple(chain.from_iterable((None, reply) for reply in replies)),
        )

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """The conversation is cut on the right, and ends with the last token that is learned."""
        kept: list[list[int]] = []
        room = self.max_seq_length
        for prompt, reply in zip(pieces[::2], pieces[1::2], strict=True):
            room -= len(prompt)
            if room <= 0:
                break
            kept += [prompt, reply[:room]]
            room -= len(reply)
        return kept

    def arrays(self, order_N: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        stops = np.array(list(accumulate(map(len, self.edges), initial=0)), dtype=np.int64)
        num_labels = [sum(stop - start for start, stop in zip(e[1::2], e[2::2], strict=True)) for e in self.edges]
        num_tokens = np.array([edges[-1] - edges[0] for edges in self.edges], dtype=np.int64)
        return {
            "edges_E": np.fromiter(chain.from_iterable(self.edges), dtype=np.int64),
            "bounds_N2": np.stack([stops[:-1], stops[1:]], axis=1)[order_N],
            "num_labels_N": np.array(num_labels, dtype=np.int64)[order_N],
        }, int(num_tokens[order_N].sum())


load_sft_dataset = partial(load_token_dataset, SFTDataset, SFTBuilder)
