"""Prefix sharing: which documents share a prompt, and how many tokens that saves.

The *shared prefix* of several documents is the part that all of them begin with, token for token, before the first
token that any of them is learned from, less its last token. That token is computed again for every document,
since it predicts the first token of the reply, which differs.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    saved = prefix_length * (num_documents - 1)
    if sharing == "auto":
        return saved >= LEAST_SHARE_SAVED * num_tokens and saved > 0
    return sharing == "on" and saved > 0


def runs_of_one_prompt(documents: Sequence[Document]) -> list[tuple[int, ...]]:
    """Runs of indices of neighbouring documents with the same prompt."""
    prompts = [document.token_ids[: document.responses[0].start] for document in documents]
    return [tuple(run) for _, run in groupby(range(len(documents)), key=prompts.__getitem__)]
