"""Compare texts with what a template or a tokenizer made of them."""

import json
import unicodedata


def compose(text: str) -> str:
    """Text in Unicode form NFKC; tokenizers must leave this unchanged."""
    return unicodedata.normalize("NFKC", text)


def squeeze(text: str) -> str:
    """Text in Unicode form NFKC without white space; templates must leave this unchanged."""
    return "".join(compose(text).split())


def escape_as_json(text: str) -> str:
    """A text as it stands in JSON, without quotes: some templates write a tool's answer so."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def find_common_end(one: str, other: str) -> str:
    """The longest text that both end with."""
    for length in range(min(len(one), len(other)), 0, -1):
        if one[-length:] == other[-length:]:
            return one[-length:]
    return ""


def describe_difference(one: str, other: str) -> str:
    """`'...this' becomes '...that'`, from shortly before the first place where two texts differ."""
    place = min(len(one), len(other))
    for index, (letter, other_letter) in enumerate(zip(one, other, strict=False)):
        if letter != other_letter:
            place = index
            break
    start = max(0, place - 20)
    return f"{one[start:][:60]!r} becomes {other[start:][:60]!r}"


def shorten(text: str) -> str:
    """The first 40 characters of a text in quotes, for messages."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
