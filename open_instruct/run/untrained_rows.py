"""Finds learned tokens whose rows in embeddings or head are untrained, which LoRA freezes.

The special tokens that a base model leaves unused have rows of zeros, or all the same row.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.hf.names import EMBEDDINGS, LM_HEAD
from open_instruct.run.pretrained import Pretrained

ROWS_READ = 1000  # of the data set, spread over it: special tokens are in nearly every one
MOST_NAMED = 5


def learned_token_ids(rows: TokenDataset) -> set[int]:
    """The ids that some rows of the data set teach."""
    chosen = np.unique(
        np.linspace(0, len(rows) - 1, num=min(ROWS_READ, len(rows))).round().astype(int)
    )
    documents = (document for row in chosen for document in rows[int(row)])
    spans = ((document.token_ids, span) for document in documents for span in document.responses)
    return {token_id for token_ids, span in spans for token_id in token_ids[span.start : span.stop]}


def find_untrained_rows(pretrained: Pretrained, token_ids: Iterable[int]) -> str | None:
    """A warning of `token_ids` with an untrained row in embeddings or head; None if all are.

    Reads these rows alone, and those of special tokens.
    """
    if pretrained.names.head != "vocabulary":
        return None
    special = {
        each
        for each in pretrained.tokenizer.added_tokens_decoder
        if each < pretrained.hf_config.vocab_size
    }
    ids = sorted({*token_ids, *special})
    found: dict[int, str] = {}
    for name, what in ((LM_HEAD, "head"), (EMBEDDINGS, "embeddings")):
        if name == LM_HEAD and pretrained.names.tied:
            continue
        rows_TD = pretrained.files.read(pretrained.names.hf_name(name))[ids]
        found |= {token_id: f"{what}: {problem}" for token_id, problem in _problems(ids, rows_TD)}
    named = [each for each in sorted(found) if each in set(token_ids)]
    if not named:
        return None
    shown = [
        f"{pretrained.tokenizer.convert_ids_to_tokens(each)!r} ({found[each]})" for each in named
    ]
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return (
        "tokens are learned or sampled whose rows were never trained, and adapters leave them "
        f"frozen: {', '.join(shown[:MOST_NAMED])}{more}. The model cannot tell such tokens apart: "
        "train it whole (without --use_lora), or choose a --chat_template_name whose tokens it "
        "knows"
    )


def _problems(ids: list[int], rows_TD: Any) -> Iterable[tuple[int, str]]:
    """Of each row of zeros, or that another token has too: its id, and which it is."""
    first: dict[bytes, int] = {}
    for token_id, row_D in zip(ids, rows_TD.float().numpy(), strict=True):
        if not row_D.any():
            yield token_id, "zeros"
        elif (other := first.setdefault(row_D.tobytes(), token_id)) != token_id:
            yield token_id, f"that of {other}"
            yield other, f"that of {token_id}"
