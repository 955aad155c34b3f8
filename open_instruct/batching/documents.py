"""Turns documents into tensors; labels are shifted here and nowhere else.

Position t of a document predicts the document's token t + 1, so a document's last position never
has a label, and nothing predicts the first token of the document that follows it in a packed row.
Where only the ends of replies are read, labels mark their last positions.

Legend: B rows, T tokens of a row, N labels of all documents, K kept label positions of a row.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from open_instruct.batching.prefixes import order_branches
from open_instruct.core.records import IGNORE_INDEX, Document, PackedBatch

T = TypeVar("T")

# Any token would do: no real one sees it, and it has no label.
PADDING = 0


def pack_documents(
    documents: Sequence[Document],
    *,
    packing: bool = True,
    pad_to_multiple_of: int = 1,
    groups: Sequence[Sequence[int]] | None = None,
) -> PackedBatch:
    """Lay documents end to end in one row; without `packing`, each in a row of its own.

    Rows are padded on the right, to the longest one and to a multiple of `pad_to_multiple_of`
    tokens. No mask is needed: attention is causal, so no real token sees the padding, and the
    padding has no labels. In a packed row it is one more document, after all others, so
    `document_lengths` always add up to T.

    `groups` are indices of documents, each of them once (default: none shares). Groups lie in the
    row in their order; the documents of a group share what they begin with, in the order of
    `order_branches`.

    Without documents the batch is a row of padding, of no sequence: a rank with nothing to do runs
    it, so that it enters the same collectives as the others.

    Example: documents of 4 and 2 tokens, `pad_to_multiple_of=8`: T is 8, document_lengths (4, 2,
    2), num_sequences 2, num_tokens 6.
    """
    assert packing or groups is None, "only packed documents share what they begin with"
    num_rows = 1 if packing else max(1, len(documents))
    rows = [_Row() for _ in range(num_rows)]
    for group in groups or [(index,) for index in range(len(documents))]:
        for index, prefix_length in order_branches(documents, group):
            rows[0 if packing else index].add_document(documents[index], index, prefix_length)
    lengths = [len(row.input_ids) for row in rows]
    width = max(1, *lengths)
    width += -width % pad_to_multiple_of
    for row, length in zip(rows, lengths, strict=True):
        if length < width:
            row.add([PADDING] * (width - length))
    prefix_lengths = rows[0].prefix_lengths
    label_positions: list[int] = []
    sequence_ids: list[int] = []
    for number, row in enumerate(rows):
        label_positions += [number * width + position for position in row.label_positions]
        sequence_ids += row.sequence_ids
    batch = PackedBatch(
        input_ids_BT=torch.tensor([row.input_ids for row in rows]),
        labels_BT=torch.tensor([row.labels for row in rows]),
        label_positions_N=torch.tensor(label_positions, dtype=torch.long),
        sequence_ids_N=torch.tensor(sequence_ids, dtype=torch.long),
        document_lengths=tuple(rows[0].lengths) if packing else None,
        prefix_lengths=tuple(prefix_lengths) if any(prefix_lengths) else None,
        num_sequences=len(documents),
        num_tokens=sum(lengths),
        num_shared_tokens=sum(prefix_lengths),
    )
    # The positions that the language-model head keeps, computed once for all passes.
    return replace(batch, kept_BK=find_label_positions(batch))


def find_label_positions(batch: PackedBatch) -> torch.Tensor:
    """The positions that have a label, (B, K), so that the language-model head runs only there.

    K is the largest number of labels in a row, at least 1. A row with fewer is filled up with its
    last position. Order is kept. Call it on the CPU, before the batch moves: K is read from the
    tensor.

    Example: labels `[[-100, 7, 8, -100], [9, -100, -100, -100]]` give positions `[[1, 2], [0, 3]]`.
    """
    has_label_BT = batch.labels_BT != IGNORE_INDEX
    num_rows, width = has_label_BT.shape
    rows, columns = has_label_BT.nonzero(as_tuple=True)
    slots_BT = has_label_BT.cumsum(dim=1) - 1
    num_kept = max(1, int(slots_BT[:, -1].max()) + 1)
    positions_BK = torch.full((num_rows, num_kept), width - 1, device=has_label_BT.device)
    positions_BK[rows, slots_BT[rows, columns]] = columns
    return positions_BK


def move_to_device(batch: T, device: torch.device) -> T:
    """`batch` (a tensor, or tensors in tuples, dicts and dataclasses) on `device`.

    Copies to a GPU are asynchronous, from pinned memory: from other memory, CUDA would first finish
    all launched work.
    """
    if device.type == "cpu":
        return batch
    moved_batch: T = _move(batch, device)
    return moved_batch


def _move(batch: Any, device: torch.device) -> Any:
    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    if is_dataclass(batch):
        moved_fields = {
            each.name: _move(getattr(batch, each.name), device) for each in fields(batch)
        }
        return replace(batch, **moved_fields)  # type: ignore[type-var]
    return tree_map_only(torch.Tensor, move_tensor, batch)


class _Row:
    """A row that is being laid out: the tokens and labels of its positions, and its segments."""

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.labels: list[int] = []
        self.label_positions: list[int] = []
        self.sequence_ids: list[int] = []
        self.lengths: list[int] = []
        self.prefix_lengths: list[int] = []
        self.path: list[int] = []  # where the tokens of the last document lie

    def add_document(self, document: Document, index: int, prefix_length: int = 0) -> None:
        """Add the document's tokens after its shared prefix, and all its labels."""
        start = len(self.input_ids)
        self.add(document.token_ids[prefix_length:], prefix_length)
        self.path = [*self.path[:prefix_length], *range(start, len(self.input_ids))]
        assert document.responses, "a document without a response"
        end = 1  # no position predicts a token at 0, so no response starts there
        for response in document.responses:
            stop = response.stop
            assert end <= response.start < stop <= len(document), (
                f"responses {document.responses} in {len(document)} tokens"
            )
            if document.reads_ends:  # nothing is predicted here, so any token will do as the label
                first = stop - 1
                labels = document.token_ids[first:stop]
            else:
                first = response.start - 1
                labels = document.token_ids[response.start : stop]
            positions = self.path[first : first + len(labels)]
            for position, label in zip(positions, labels, strict=True):
                assert self.labels[position] in (IGNORE_INDEX, label), (
                    "documents share a position, but not its label"
                )
                self.labels[position] = label
            self.label_positions += positions
            self.sequence_ids += [index] * len(labels)
            end = stop

    def add(self, token_ids: Sequence[int], prefix_length: int = 0) -> None:
        """Add tokens without labels, such as padding."""
        self.input_ids += token_ids
        self.labels += [IGNORE_INDEX] * len(token_ids)
        self.lengths.append(len(token_ids))
        self.prefix_lengths.append(prefix_length)
