"""Preference pairs as the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from open_instruct.packing.documents import lay_out
from open_instruct.records import PreferenceBatch, PreferenceExample


def preference_batch(
    examples: Sequence[PreferenceExample], *, packing: bool, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PreferenceBatch:
    """The tensors of one microbatch of P pairs: sequences 0..P-1 chosen, P..2P-1 rejected, in pair order.

    Packed, all 2P documents lie in one row, with no padding between chosen and rejected. No examples give
    a batch of one unlabelled document.
    """
    documents = [example.chosen for example in examples] + [example.rejected for example in examples]
    return PreferenceBatch(
        packed=lay_out(documents, packing=packing, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of),
        row_ids=tuple(example.row_id for example in examples),
    )
