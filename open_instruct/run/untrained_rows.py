"""Tokens learned with rows of zeros: a base model's unused special tokens may have them, and LoRA freezes them."""

from collections.abc import Iterable

import numpy as np

from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.hf.names import EMBEDDINGS, LM_HEAD
from open_instruct.run.pretrained import Pretrained

ROWS_READ = 1000  # of the data set, spread over it: special tokens are in nearly every one
MOST_NAMED = 5


def learned_token_ids(rows: TokenDataset) -> set[int]:
    """The ids that some rows of the data set teach."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, num=min(ROWS_READ, len(rows))).round().astype(int))
    documents = (document for row in chosen for document in rows[int(row)])
    spans = ((document.token_ids, span) for document in documents for span in document.responses)
    return {token_id for token_ids, span in spans for token_id in token_ids[span.start : span.stop]}


def find_frozen_zeros(pretrained: Pretrained, token_ids: Iterable[int]) -> str | None:
    """A warning of the tokens among `token_ids` whose row in embeddings or head is all zero; None if there is none.

    Reads these rows alone.
    """
    if pretrained.names.head != "vocabulary":
        return None
    ids = sorted(token_ids)
    zeros: dict[int, str] = {}
    for name, what in ((LM_HEAD, "the head"), (EMBEDDINGS, "the embeddings")):
        if name == LM_HEAD and pretrained.names.tied:
            continue
        rows_TD = pretrained.files.read(pretrained.names.hf_name(name))[ids]
        zeros |= {token_id: what for token_id, row_D in zip(ids, rows_TD, strict=True) if not row_D.any()}
    if not zeros:
        return None
    shown = [f"{pretrained.tokenizer.convert_ids_to_tokens(each)!r} ({zeros[each]})" for each in sorted(zeros)]
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return (
        f"rows of zeros, which adapters leave frozen, are learned or sampled: those of {', '.join(shown[:MOST_NAMED])}"
        f"{more}. The model cannot tell such tokens apart: train it whole (without --use_lora), or choose a "
        "--chat_template_name whose tokens it knows"
    )
