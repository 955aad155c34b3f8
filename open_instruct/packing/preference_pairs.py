"""Preference pairs as the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from open_instruct.config.sections import PrefixSharing
from open_instruct.packing.documents import lay_out
from open_instruct.packing.prefixes import groups_that_share, pays
from open_instruct.records import PreferenceBatch, PreferenceExample


def preference_batch(
    examples: Sequence[PreferenceExample],
    *,
    packing: bool,
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    prefix_sharing: PrefixSharing = "off",
) -> PreferenceBatch:
    """The tensors of one microbatch of P pairs: sequences 0..P-1 chosen, P..2P-1 rejected, in pair order.

    Packed, all 2P documents lie in one row, with no padding between chosen and rejected; a pair whose prompt is
    shared lies together, behind its prompt. No examples give a batch of one unlabelled document.
    """
    documents = [example.chosen for example in examples] + [example.rejected for example in examples]
    pairs = [(index, len(examples) + index) for index in range(len(examples))]
    return PreferenceBatch(
        packed=lay_out(
            documents,
            packing=packing,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
            groups=None if prefix_sharing == "off" else groups_that_share(documents, pairs, prefix_sharing),
        ),
        row_ids=tuple(example.row_id for example in examples),
    )


def num_packed_tokens(num_tokens: int, num_prompt_tokens: int, sharing: PrefixSharing) -> int:
    """Tokens that a pair takes in a packed row, of `num_tokens` in its two conversations.

    Example: two conversations of 60 tokens with a prompt of 40 take 120 tokens, or 81 sharing their prompt.
    """
    prefix_length = num_prompt_tokens - 1
    return num_tokens - prefix_length if pays(prefix_length, 2, num_tokens, sharing) else num_tokens
