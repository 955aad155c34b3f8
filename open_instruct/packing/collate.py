"""Rows of a data set as the tensors of one microbatch, whatever is learned from them.

Legend: R rows, D documents of a row, S = D * R sequences, N rows of the data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from open_instruct.config.sections import PrefixSharing
from open_instruct.packing.documents import lay_out
from open_instruct.packing.prefixes import groups_that_share, pays
from open_instruct.records import Batch, Document


def collate(
    rows: Sequence[tuple[Document, ...]],
    row_ids: Sequence[int],
    *,
    packing: bool,
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    prefix_sharing: PrefixSharing = "off",
    scores: Mapping[str, np.ndarray] | None = None,
) -> Batch:
    """The tensors of one microbatch of R rows: sequence d * R + r is document d of the row at r.

    Packed, all documents lie in one row, with no padding between them; a row whose prompt is shared lies together,
    behind its prompt. No rows give a batch of one unlabelled document.

    `scores` are frozen values of all documents of the data set by name, float32 (N, D); the batch has those of its
    documents as `NAME_S`.
    """
    documents = [document for of_rows in zip(*rows, strict=True) for document in of_rows]
    groups = None
    if prefix_sharing != "off":
        together = [tuple(range(row, len(documents), len(rows))) for row in range(len(rows))]
        groups = groups_that_share(documents, together, prefix_sharing)
    return Batch(
        packed=lay_out(
            documents,
            packing=packing,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
            groups=groups,
        ),
        row_ids=tuple(row_ids),
        values={
            f"{name}_S": torch.from_numpy(values_ND[list(row_ids)].T.flatten())
            for name, values_ND in (scores or {}).items()
        },
    )


def num_packed_tokens(num_tokens: int, num_prompt_tokens: int, num_documents: int, sharing: PrefixSharing) -> int:
    """Tokens that a row takes in a packed row, of `num_tokens` in all of its documents.

    Example: two conversations of 60 tokens with a prompt of 40 take 120 tokens, or 81 sharing their prompt.
    """
    prefix_length = num_prompt_tokens - 1
    saved = prefix_length * (num_documents - 1)
    return num_tokens - saved if pays(prefix_length, num_documents, num_tokens, sharing) else num_tokens
