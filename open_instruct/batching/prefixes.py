"""Prefix sharing: tokens that several documents begin with lie in a row once, as a tree.

The *shared prefix* of two documents is what both begin with, token for token, less the last of
these tokens. That token is computed again for each of them, since it predicts another token in
each: so every position of a row has one label at most, and documents that share a position share
its label. Prompts, turns and replies are shared alike, learned or not. Torch is not imported: the
planner counts here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count, groupby
from operator import ne
from typing import NamedTuple

from open_instruct.config.sections import PrefixSharing
from open_instruct.core.records import Document

# Sharing costs longer calls of attention; `auto` shares only if it saves this share of the tokens.
LEAST_SHARE_SAVED = 0.05
# Replies to one prompt often begin with the same few words. Only from so many tokens on do they
# share them.
LEAST_OF_REPLIES = 8


class Branch(NamedTuple):
    """A document of a row, by its index, and the tokens that it shares with the one before it."""

    document: int
    prefix_length: int


def count_shared_prefix(one: Document, other: Document, *, num_known: int = 0) -> int:
    """Tokens of the shared prefix of two documents; the first `num_known` are known to be equal.

    Example: prompts 5 9 2 and 5 9 2 with different replies share 5 9, so 2.
    """
    differs_at = compress(
        count(num_known), map(ne, one.token_ids[num_known:], other.token_ids[num_known:])
    )
    num_common = next(differs_at, min(len(one), len(other)))
    return cut_shared_prefix(num_common, min(one.responses[0].start, other.responses[0].start))


def cut_shared_prefix(num_common: int, num_prompt: int) -> int:
    """Tokens of the shared prefix of documents that begin with `num_common` equal tokens."""
    if num_common < num_prompt + LEAST_OF_REPLIES:
        num_common = min(num_common, num_prompt)
    return max(num_common - 1, 0)


def order_branches(documents: Sequence[Document], group: Sequence[int]) -> list[Branch]:
    """The documents of a group (indices) as a walk of their tree, depth first.

    Each goes behind those that it shares most with; so documents which share only their prompt stay
    in their order.

    Example: token ids 1 2 3 4, 1 2 6 and 1 2 3 5 (all but the first learned only from the last
    token on) become::

        [Branch(0, 0), Branch(2, 2), Branch(1, 1)]
    """
    row: list[Branch] = []
    for index in group:
        num_shared = most = place = 0
        for next_place, (other, with_one_before) in enumerate(row, start=1):
            # Of two that share more with each other than with a third, both share the same with it.
            if with_one_before == num_shared:
                num_shared = count_shared_prefix(
                    documents[index], documents[other], num_known=num_shared
                )
            else:
                num_shared = min(num_shared, with_one_before)
            if num_shared >= most:
                most = num_shared
                place = next_place
        row.insert(place, Branch(index, most))
    return row


def split_unshared_groups(
    documents: Sequence[Document], groups: Sequence[Sequence[int]], sharing: PrefixSharing
) -> list[tuple[int, ...]]:
    """Split the groups of indices whose sharing does not pay into single documents."""
    split_groups: list[tuple[int, ...]] = []
    for group in groups:
        num_saved = sum(branch.prefix_length for branch in order_branches(documents, group))
        if is_worth_sharing(num_saved, sum(len(documents[i]) for i in group), sharing):
            split_groups.append(tuple(group))
        else:
            split_groups.extend((i,) for i in group)
    return split_groups


def is_worth_sharing(num_saved: int, num_tokens: int, sharing: PrefixSharing) -> bool:
    """Whether documents of `num_tokens` tokens in all should share, to save `num_saved` of them."""
    if sharing == "auto":
        return num_saved >= LEAST_SHARE_SAVED * num_tokens and num_saved > 0
    return sharing == "on" and num_saved > 0


def count_saved_tokens(prefix_length: int, num_documents: int) -> int:
    """Tokens that a row of documents saves by holding their shared prefix once."""
    return prefix_length * (num_documents - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRows:
    """Rows of documents of `length` tokens each, in groups of `per_group` that share a prefix of
    `prefix` tokens.

    Example: two groups of three documents of 10 tokens, 4 of them shared, take 44 tokens::

        FullRows(length=10, prefix=4, per_group=3).count_tokens(6)
    """

    length: int
    prefix: int = 0
    per_group: int = 1

    def count_tokens(self, num_documents: int) -> int:
        """Tokens that so many documents take in a row; the last group may be a smaller one."""
        num_groups = -(-num_documents // self.per_group)
        return num_groups * self.prefix + num_documents * (self.length - self.prefix)

    def fill_groups(self, num_tokens: int) -> tuple[list[int], int]:
        """The documents of each group in a row of `num_tokens`, and the tokens that are left."""
        num_whole, num_left = divmod(num_tokens, self.count_tokens(self.per_group))
        groups = [self.per_group] * num_whole
        num_more = max(0, num_left - self.prefix) // (self.length - self.prefix)
        if num_more:  # the last group is cut
            groups.append(num_more)
            num_left -= self.count_tokens(num_more)
        return groups, num_left


def find_prompt_runs(documents: Sequence[Document]) -> list[tuple[int, ...]]:
    """Runs of indices of neighbouring documents with the same prompt."""
    prompts = [document.token_ids[: document.responses[0].start] for document in documents]
    return [tuple(run) for _, run in groupby(range(len(documents)), key=prompts.__getitem__)]
