"""Whether a loaded tokenizer gives the ids of its tokenizer.json, seen on a few texts.

What is compared with is `tokenizers.Tokenizer.from_file`, without a second copy of its vocabulary:
that takes a second to read, and a class or a setting that changes ids changes the parts around it,
the added tokens, or the vocabulary's own settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PARTS = ("normalizer", "pre_tokenizer", "decoder")
# How a BPE model takes a piece; a class that makes one of its own may leave them out.
MODEL_SETTINGS = (
    "type",
    "byte_fallback",
    "ignore_merges",
    "fuse_unk",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
# Of an added token; the ids of a text depend on them.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
MAX_ADDED = 32
# The white space of prose and code; a tokenizer that changes it would teach, and be asked with,
# another text.
WHITE_SPACE = " a  b\n\n\tc 12\n    d \n"
PROSE = (
    "It's 1234567 o'clock,\nand   we'll meet\tat 3:45!\n\n    def f(x): return x[10:] + 'ab'  # "
    "été, 漢字, 👍🏽\r\n"
)
TEXTS = (
    WHITE_SPACE,
    PROSE,
    "Saytwowords. x=0.5;\t\t// 12:30\r\n\r\n",
    "ÀÉ ﬁ e\u0301 \u00a0\u200b\u2028 ½ ٣٤ 👩‍👩‍👧 ",
)


def find_other_ids(loaded: Tokenizer, fields: Mapping[str, Any]) -> str | None:
    """The first text that `loaded` gives other ids than its tokenizer.json, with both; None where
    there is none.

    :param fields: those of the tokenizer.json from which it was loaded.
    """
    reference = _as_the_file_says(loaded, fields)
    for text in (*TEXTS, _text_of_added_tokens(loaded, reference)):
        ids, right = (
            each.encode(text, add_special_tokens=False).ids for each in (loaded, reference)
        )
        if ids != right:
            at = next(
                (i for i, pair in enumerate(zip(ids, right, strict=False)) if pair[0] != pair[1]), 0
            )
            shown, wanted = (each[max(0, at - 2) : at + 6] for each in (ids, right))
            return f"{_around(reference, text, at)!r} becomes {shown}, and {wanted} by the file"
        read, meant = (
            each.decode(right, skip_special_tokens=False) for each in (loaded, reference)
        )
        if read != meant:
            return f"the ids {right[:6]}... read {read[:40]!r}, and {meant[:40]!r} by the file"
    return next(_other_settings(loaded, fields), None)


def without_vocabulary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json with a model that knows nothing (of Unigram: little); its parts are as
    they were.
    """
    model = dict(fields["model"])
    if isinstance(model.get("vocab"), list):
        model["vocab"] = model["vocab"][: 1 + max(0, model.get("unk_id") or 0)]
    else:
        model["vocab"] = {}
    if "merges" in model:
        model["merges"] = []
    return {**fields, "model": model, "added_tokens": []}


def _as_the_file_says(loaded: Tokenizer, fields: Mapping[str, Any]) -> Tokenizer:
    """The file's parts and added tokens around the vocabulary that is loaded."""
    from tokenizers import AddedToken, Tokenizer

    parts = Tokenizer.from_str(json.dumps(without_vocabulary(fields)))
    reference = Tokenizer(loaded.model)
    for name in PARTS:
        if (part := getattr(parts, name)) is not None:
            setattr(reference, name, part)
    for is_special, tokens in groupby(
        fields.get("added_tokens") or (), key=lambda token: bool(token["special"])
    ):
        add = reference.add_special_tokens if is_special else reference.add_tokens
        add(
            [
                AddedToken(**{name: value for name, value in token.items() if name != "id"})
                for token in tokens
            ]
        )
    return reference


def _text_of_added_tokens(loaded: Tokenizer, reference: Tokenizer) -> str:
    """The first added tokens, and those whose flags are others than the file's, each between words
    and white space.
    """
    own, right = (
        {
            token.content: [getattr(token, flag) for flag in FLAGS]
            for token in each.get_added_tokens_decoder().values()
        }
        for each in (loaded, reference)
    )
    changed = [content for content, flags in right.items() if own.get(content) != flags]
    shown = [*right][:MAX_ADDED] + changed[:MAX_ADDED]
    return "".join(f"a {content} \nb{content}c" for content in shown)


def _around(tokenizer: Tokenizer, text: str, at: int) -> str:
    """The part of a text around its token number `at`."""
    offsets: Sequence[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
    start = offsets[min(max(0, at - 2), len(offsets) - 1)][0] if offsets else 0
    return text[start : start + 40]


def _other_settings(loaded: Tokenizer, fields: Mapping[str, Any]) -> Iterator[str]:
    model = fields["model"]
    for name in MODEL_SETTINGS[1:]:
        value = getattr(loaded.model, name, model.get(name))
        if (value or None) != (model.get(name) or None):
            yield f"{name} of its model is {value!r}, and {model.get(name)!r} in the file"
    if (size := loaded.get_vocab_size(with_added_tokens=False)) != len(model["vocab"]):
        yield f"its model has {size:,} tokens, and {len(model['vocab']):,} in the file"
