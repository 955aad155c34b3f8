"""Check on a few texts that a loaded tokenizer gives the ids of its tokenizer.json.

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


def find_other_ids(loaded_tokenizer: Tokenizer, fields: Mapping[str, Any]) -> str | None:
    """The first difference between the ids of a tokenizer and its file, in words; None without one.

    Args:
        loaded: the tokenizer.
        fields: those of the tokenizer.json from which it was loaded.
    """
    reference = _build_reference(loaded_tokenizer, fields)
    for text in (*TEXTS, _write_added_tokens(loaded_tokenizer, reference)):
        ids = loaded_tokenizer.encode(text, add_special_tokens=False).ids
        right = reference.encode(text, add_special_tokens=False).ids
        if ids != right:
            return _describe_difference(ids, right, reference, text)
        decoded = loaded_tokenizer.decode(right, skip_special_tokens=False)
        right_text = reference.decode(right, skip_special_tokens=False)
        if decoded != right_text:
            return (
                f"the ids {right[:6]}... read {decoded[:40]!r}, and {right_text[:40]!r} by the file"
            )
    return next(_list_other_settings(loaded_tokenizer, fields), None)


def find_first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first place where two sequences differ; 0 where one begins with the other."""
    for place, (item, other_item) in enumerate(zip(one, other, strict=False)):
        if item != other_item:
            return place
    return 0


def _describe_difference(
    ids: Sequence[int],
    right: Sequence[int],
    reference: Tokenizer,
    text: str,
) -> str:
    place = find_first_difference(ids, right)
    window = slice(max(0, place - 2), place + 6)
    words = _find_text_around(reference, text, place)
    return f"{words!r} becomes {ids[window]}, and {right[window]} by the file"


def drop_vocabulary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json with its parts, and a model that knows nothing (of Unigram: little)."""
    model = dict(fields["model"])
    if isinstance(model.get("vocab"), list):
        model["vocab"] = model["vocab"][: 1 + max(0, model.get("unk_id") or 0)]
    else:
        model["vocab"] = {}
    if "merges" in model:
        model["merges"] = []
    return {
        **fields,
        "model": model,
        "added_tokens": [],
    }


def _build_reference(loaded_tokenizer: Tokenizer, fields: Mapping[str, Any]) -> Tokenizer:
    """The file's parts and added tokens around the vocabulary that is loaded."""
    from tokenizers import Tokenizer

    parts = Tokenizer.from_str(json.dumps(drop_vocabulary(fields)))
    reference = Tokenizer(loaded_tokenizer.model)
    for name in PARTS:
        part = getattr(parts, name)
        if part is not None:
            setattr(reference, name, part)
    added = fields.get("added_tokens") or ()
    for is_special, tokens in groupby(added, key=lambda token: bool(token["special"])):
        add = reference.add_special_tokens if is_special else reference.add_tokens
        add([_build_added_token(token) for token in tokens])
    return reference


def _build_added_token(fields: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken

    return AddedToken(**{name: value for name, value in fields.items() if name != "id"})


def _write_added_tokens(loaded_tokenizer: Tokenizer, reference: Tokenizer) -> str:
    """A text of added tokens, each between words and white space.

    They are the first ones, and those whose flags are others than the file's.
    """
    loaded_flags = _list_token_flags(loaded_tokenizer)
    right_flags = _list_token_flags(reference)
    changed_tokens = [
        content for content, flags in right_flags.items() if loaded_flags.get(content) != flags
    ]
    tokens_shown = [*right_flags][:MAX_ADDED] + changed_tokens[:MAX_ADDED]
    return "".join(f"a {content} \nb{content}c" for content in tokens_shown)


def _list_token_flags(tokenizer: Tokenizer) -> dict[str, list[bool]]:
    tokens = tokenizer.get_added_tokens_decoder().values()
    return {token.content: [getattr(token, flag) for flag in FLAGS] for token in tokens}


def _find_text_around(tokenizer: Tokenizer, text: str, number: int) -> str:
    """The part of a text around its token of this number."""
    offsets: Sequence[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
    if not offsets:
        return text[:40]
    first = min(max(0, number - 2), len(offsets) - 1)
    start, _ = offsets[first]
    return text[start : start + 40]


def _list_other_settings(loaded_tokenizer: Tokenizer, fields: Mapping[str, Any]) -> Iterator[str]:
    model = fields["model"]
    for name in MODEL_SETTINGS[1:]:
        value = getattr(loaded_tokenizer.model, name, model.get(name))
        if (value or None) != (model.get(name) or None):
            yield f"{name} of its model is {value!r}, and {model.get(name)!r} in the file"
    size = loaded_tokenizer.get_vocab_size(with_added_tokens=False)
    if size != len(model["vocab"]):
        yield f"its model has {size:,} tokens, and {len(model['vocab']):,} in the file"
