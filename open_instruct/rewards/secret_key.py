"""Hide the key of a judge's server in texts for logs, traces and pages."""

import base64
import math
import os
from collections.abc import Iterator
from urllib.parse import quote

JUDGE_KEY = "OPENAI_API_KEY"
# So many characters of the key in a row are hidden, too: whoever repeats it may have cut it.
MIN_PIECE_CHARACTERS = 8


def hide_key(text: str) -> str:
    """`text` with `$OPENAI_API_KEY` in place of the key and its pieces.

    The key is also found in base64 and in a URL.
    """
    key = os.environ.get(JUDGE_KEY)
    if not key:
        return text
    for form in _list_forms(key):
        text = _hide_pieces(text, form)
    return text


def _list_forms(key: str) -> Iterator[str]:
    yield key
    escaped = quote(key, safe="")
    if escaped != key:
        yield escaped
    if len(key) < MIN_PIECE_CHARACTERS:
        return  # its base64 would stand in other words by chance
    # Letters of base64 depend on where in a group of three the key begins.
    for num_before in range(3):
        encoded = base64.b64encode(b" " * num_before + key.encode())
        num_letters_before = math.ceil(4 * num_before / 3)
        # The last may depend on what follows.
        letters = encoded.decode()[num_letters_before:].rstrip("=")[:-1]
        yield letters
        url_letters = letters.translate(str.maketrans("+/", "-_"))
        if url_letters != letters:
            yield url_letters


def _hide_pieces(text: str, form: str) -> str:
    size = min(len(form), MIN_PIECE_CHARACTERS)
    pieces = {form[start : start + size] for start in range(len(form) - size + 1)}
    visible_pieces = []
    end = 0  # of what is shown or hidden
    start = 0
    while start <= len(text) - size:
        if text[start : start + size] not in pieces:
            start += 1
            continue
        visible_pieces += [text[end:start], f"${JUDGE_KEY}"]
        while text[start : start + size] in pieces:
            start += 1
        start += size - 1
        end = start
    return "".join([*visible_pieces, text[end:]])
