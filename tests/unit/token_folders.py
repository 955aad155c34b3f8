"""Folders of token files, in the layout of an SFT conversion for OLMo-core."""

import gzip
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.core.records import Document

Labelled = tuple[Sequence[int], Sequence[int]]
"""The token ids of a document, and for each whether it is learned."""


def label(document: Document) -> Labelled:
    mask = np.zeros(len(document), dtype=np.uint8)
    for span in document.responses:
        mask[span.start : span.stop] = 1
    return document.token_ids, mask.tolist()


def write_token_folder(
    folder: Path,
    documents: Sequence[Labelled],
    *,
    cuts: Sequence[int] = (),
    dtype: Any = np.uint16,
    tokenizer: Any = None,
) -> Path:
    """Write the documents end to end, in files that are cut at the tokens `cuts`."""
    folder.mkdir(parents=True, exist_ok=True)
    token_ids_T = np.array([token for ids, _ in documents for token in ids], dtype=dtype)
    mask_T = np.array([bit for _, mask in documents for bit in mask], dtype=np.bool_)
    bounds = list(pairwise(accumulate((len(ids) for ids, _ in documents), initial=0)))
    for part, (first, last) in enumerate(pairwise([0, *cuts, len(token_ids_T)])):
        token_ids_T[first:last].tofile(folder / f"token_ids_part_{part:04d}.npy")
        mask_T[first:last].tofile(folder / f"labels_mask_part_{part:04d}.npy")
        with gzip.open(folder / f"token_ids_part_{part:04d}.csv.gz", "wt") as file:
            for start, stop in bounds:
                if stop > first and start < last:
                    file.write(f"{max(start, first) - first},{min(stop, last) - first}\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "tokenizer")
    return folder
