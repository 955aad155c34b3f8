"""The key of a judge's server, taken out of texts for logs, traces and pages."""

import base64
import math
import os
from collections.abc import Iterator
from urllib.parse import quote

JUDGE_KEY = "OPENAI_API_KEY"
# So many characters of the key in a row are taken out, too: whoever repeats it may have cut it.
MIN_PIECE_CHARACTERS = 8


def without_key(text: str) -> str:
    """`text` with `$OPENAI_API_KEY` in place of the key and of its pieces, as they are and in
    base64 or a URL.
    """
    key = os.environ.get(JUDGE_KEY)
    if not key:
        return text
    for form in _forms(key):
        text = _without_pieces(text, form)
    return text


def _forms(key: str) -> Iterator[str]:
    yield key
    if (escaped := quote(key, safe="")) != key:
        yield escaped
    if len(key) < MIN_PIECE_CHARACTERS:
        return  # its base64 would stand in other words by chance
    # Letters of base64 depend on where in a group of three the key begins.
    for num_before in range(3):
        encoded = base64.b64encode(b" " * num_before + key.encode())
        num_of_others = math.ceil(4 * num_before / 3)
        # The last may depend on what follows.
        letters = encoded.decode()[num_of_others:].rstrip("=")[:-1]
        yield letters
        if (for_urls := letters.translate(str.maketrans("+/", "-_"))) != letters:
            yield for_urls


def _without_pieces(text: str, form: str) -> str:
    size = min(len(form), MIN_PIECE_CHARACTERS)
    pieces = {form[start : start + size] for start in range(len(form) - size + 1)}
    shown = []
    end = 0  # of what is shown or taken out
    at = 0
    while at <= len(text) - size:
        if text[at : at + size] not in pieces:
            at += 1
            continue
        shown += [text[end:at], f"${JUDGE_KEY}"]
        while text[at : at + size] in pieces:
            at += 1
        end = at = at + size - 1
    return "".join([*shown, text[end:]])
