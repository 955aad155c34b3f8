"""Finds learned tokens whose rows in embeddings or head are untrained, which LoRA freezes.

The special tokens that a base model leaves unused have rows of zeros, or all the same row.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.hf.names import EMBEDDINGS, LM_HEAD
from open_instruct.run.pretrained import Pretrained

ROWS_READ = 1000  # of the data set, spread over it: special tokens are in nearly every one
MAX_NAMED = 5


def find_learned_token_ids(rows: TokenDataset) -> set[int]:
    """The ids that some rows of the data set teach."""
    row_indices = np.linspace(0, len(rows) - 1, num=min(ROWS_READ, len(rows))).round().astype(int)
    token_ids: set[int] = set()
    for row in np.unique(row_indices).tolist():
        for document in rows[row]:
            for span in document.responses:
                token_ids.update(document.token_ids[span.start : span.stop])
    return token_ids


def find_untrained_rows(pretrained: Pretrained, token_ids: Iterable[int]) -> str | None:
    """A warning of `token_ids` with an untrained row in embeddings or head; None if all are.

    Reads these rows alone, and those of special tokens.
    """
    if pretrained.names.head != "vocabulary":
        return None
    vocab_size = pretrained.hf_config.vocab_size
    special = {each for each in pretrained.tokenizer.added_tokens_decoder if each < vocab_size}
    ids = sorted({*token_ids, *special})
    if not ids:
        return None
    problems: dict[int, str] = {}
    for name, what in ((LM_HEAD, "head"), (EMBEDDINGS, "embeddings")):
        if name == LM_HEAD and pretrained.names.tied:
            continue
        read = pretrained.files.open_tensor(pretrained.names.hf_name(name))
        rows_TD = torch.cat([read((slice(each, each + 1),)) for each in ids])
        for token_id, problem in _find_problems(ids, rows_TD):
            problems[token_id] = f"{what}: {problem}"
    token_ids_named = sorted(problems.keys() & set(token_ids))
    if not token_ids_named:
        return None
    texts = []
    for token_id in token_ids_named[:MAX_NAMED]:
        token = pretrained.tokenizer.convert_ids_to_tokens(token_id)
        texts.append(f"{token!r} ({problems[token_id]})")
    more = (
        f" and {len(token_ids_named) - MAX_NAMED} more" if len(token_ids_named) > MAX_NAMED else ""
    )
    return (
        "tokens are learned or sampled whose rows were never trained, and adapters leave them "
        f"frozen: {', '.join(texts)}{more}. The model cannot tell such tokens apart: "
        "train it whole (without --use_lora), or choose a --chat_template_name whose tokens it "
        "knows"
    )


def _find_problems(ids: list[int], rows_TD: Any) -> Iterator[tuple[int, str]]:
    """Yield each token whose row is zeros, or that of another token, with which of these it is."""
    first: dict[bytes, int] = {}
    for token_id, row_D in zip(ids, rows_TD.float().numpy(), strict=True):
        if not row_D.any():
            yield token_id, "zeros"
            continue
        other = first.setdefault(row_D.tobytes(), token_id)
        if other != token_id:
            yield token_id, f"that of {other}"
            yield other, f"that of {token_id}"
