"""Prefix sharing: which documents share a prompt, and how many tokens that saves.

The *shared prefix* of several documents is the part that all of them begin with, token for token, before the first
token that any of them is learned from, less its last token. That token is computed again for every document,
since it predicts the first token of the reply, which differs. Torch is not imported: the planner counts here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from open_instruct.config.sections import PrefixSharing
from open_instruct.records import Document

# A shared prompt costs one more call of attention; `auto` shares only if it saves this share of the tokens.
LEAST_SHARE_SAVED = 0.05


def shared_prefix_length(documents: Sequence[Document]) -> int:
    """Tokens of the shared prefix of `documents`; 0 of a single one.

    Example: prompts 5 9 2 and 5 9 2 with different replies share 5 9, so 2.
    """
    if len(documents) < 2:
        return 0
    prompts = [document.token_ids[: document.responses[0].start] for document in documents]
    # A prefix that the first and the last in sorted order share is shared by all.
    first, last = min(prompts), max(prompts)
    num_common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(min(num_common, len(last)) - 1, 0)


def groups_that_share(
    documents: Sequence[Document], groups: Sequence[Sequence[int]], sharing: PrefixSharing
) -> list[tuple[int, ...]]:
    """`groups` of indices of `documents`; groups whose sharing does not pay are split into single documents."""
    chosen: list[tuple[int, ...]] = []
    for group in groups:
        members = [documents[i] for i in group]
        if pays(shared_prefix_length(members), len(members), sum(map(len, members)), sharing):
            chosen.append(tuple(group))
        else:
            chosen.extend((i,) for i in group)
    return chosen


def pays(prefix_length: int, num_documents: int, num_tokens: int, sharing: PrefixSharing) -> bool:
    """Whether documents with `num_tokens` tokens in all should share a prefix of `prefix_length`."""
    saved = saved_tokens(prefix_length, num_documents)
    if sharing == "auto":
        return saved >= LEAST_SHARE_SAVED * num_tokens and saved > 0
    return sharing == "on" and saved > 0


def saved_tokens(prefix_length: int, num_documents: int) -> int:
    """Tokens that documents take less in a row where they share a prefix, which then lies there once."""
    return prefix_length * (num_documents - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRows:
    """Rows of documents of `length` tokens each, in groups of `per_group` that share a prefix of `prefix` tokens.

    Example: two groups of three documents of 10 tokens, 4 of them shared, take 44 tokens::

        FullRows(length=10, prefix=4, per_group=3).tokens_of(6)
    """

    length: int
    prefix: int
    per_group: int

    def tokens_of(self, num_documents: int) -> int:
        """Tokens that so many documents take in a row; the last group may be smaller than the others."""
        num_groups = -(-num_documents // self.per_group)
        return num_groups * self.prefix + num_documents * (self.length - self.prefix)

    def groups_in(self, num_tokens: int) -> tuple[list[int], int]:
        """The number of documents of each group in a row of `num_tokens`, the last group cut; and the tokens left."""
        num_whole, left = divmod(num_tokens, self.tokens_of(self.per_group))
        groups = [self.per_group] * num_whole
        if num_more := max(0, left - self.prefix) // (self.length - self.prefix):
            groups.append(num_more)
            left -= self.tokens_of(num_more)
        return groups, left


def runs_of_one_prompt(documents: Sequence[Document]) -> list[tuple[int, ...]]:
    """Runs of indices of neighbouring documents with the same prompt."""
    prompts = [document.token_ids[: document.responses[0].start] for document in documents]
    return [tuple(run) for _, run in groupby(range(len(documents)), key=prompts.__getitem__)]
