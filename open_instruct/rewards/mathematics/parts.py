"""The parts of a cleaned answer of mathematics: entries, brackets, sides of equations, words,
quantities.
"""

import re
from fractions import Fraction
from itertools import pairwise

from open_instruct.rewards.mathematics.units import UNITS, unit_of

_OPENS, _CLOSES = "([{", ")]}"
WORDS = re.compile(r"⟨([^⟩]*)⟩")
_CHOICE = re.compile(r"\(([A-J])\)\s*(.*)|([A-J])[).:]\s+(.+)", re.DOTALL)
_CONSTANTS = {"e", "i", r"\pi", r"\infty"}
_INDEX = re.compile(r"_\{[^{}]*\}|_\w|\^\{?-1\}?|'")
_ARGUMENTS = re.compile(
    r"(?<=[A-Za-z⟩}])\s*\([^()]*\)|\|([A-Za-z]+)\||\\(?:overline|vec|hat|angle|triangle|overrightarrow)(?![a-z])"
)
_FUNCTION = re.compile(r"\\(?:sqrt|pi|infty|sin|cos|tan|log|ln)(?![a-z])")
_AMOUNT = re.compile(
    r"(?:⟨(dollars)⟩\s*)?(-?\d+(?:\.\d+)?|-?\\frac\{\d+\}\{[1-9]\d*\})\s*(?:⟨([^⟩]*)⟩)?"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_COMMAS = re.compile(
    r"[,;]\s*⟨(?:and|or)⟩|[,;]|⟨(?:and|or)⟩|\\(?:text)?(?:and|lor|land|vee)(?![a-zA-Z])"
)
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx(?![a-zA-Z])|\\equiv(?![a-zA-Z])|:=")


def squeezed(text: str) -> str:
    """The text without spaces that say nothing; words in lower case."""
    text = WORDS.sub(lambda match: f"⟨{match[1].lower().strip(' .')}⟩", text)
    text = re.sub(r"\s+", " ", text.replace("$", "")).strip()
    return re.sub(r"(?<![\w.]) | (?![\w.])|(?<=\\[a-zA-Z]) (?=\d)", "", text)


def unwrapped(text: str) -> str:
    """The text without brackets around all of it that only group."""
    text = text.strip()
    while (
        text[:1] in ("(", "{")
        and _closing(text, 0) == len(text) - 1
        and len(split_items(text[1:-1])) == 1
    ):
        if re.fullmatch(r"\([A-J]\)", text):
            return text
        text = text[1:-1].strip()
    return text


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed, by any bracket; -1 if it is not."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in _OPENS) - (text[at] in _CLOSES)
        if depth == 0:
            return at
    return -1


def _split(text: str, at_top: re.Pattern[str]) -> list[str]:
    """The pieces of a text between matches of a pattern that stand in no brackets."""
    depths = [0]
    for letter in text:
        depths.append(depths[-1] + (letter in _OPENS) - (letter in _CLOSES))
    inside = {match.start() for match in re.finditer(r"\\begin", text)}
    ends = [
        0,
        *(
            at
            for match in at_top.finditer(text)
            if depths[match.start()] == 0 and not inside
            for at in match.span()
        ),
    ]
    return [text[start:stop].strip() for start, stop in pairwise([*ends, len(text)])][::2]


def split_items(text: str) -> list[str]:
    """The entries of a list, of which plus or minus makes two."""
    entries = []
    for item in _split(_with_words_apart(text), _COMMAS):
        has_both = _PLUS_MINUS.search(item) and not _PLUS_MINUS.fullmatch(item)
        entries += [_with_sign(item, "+"), _with_sign(item, "-")] if has_both else [item]
    return [entry for entry in entries if entry] or [text]


def _with_words_apart(text: str) -> str:
    """The text with "and" and "or" as words by themselves."""
    text = re.sub(r"⟨(and|or) ([^⟩]*)⟩", r"⟨\1⟩⟨\2⟩", text)
    return re.sub(r"⟨([^⟩]*) (and|or)⟩", r"⟨\1⟩⟨\2⟩", text)


def _with_sign(text: str, sign: str) -> str:
    """The text with one sign for plus or minus, and the other for minus or plus."""
    signs = {"p": sign, "m": "-" if sign == "+" else "+"}
    return _PLUS_MINUS.sub(lambda match: signs[match[0][1]], text).removeprefix("+").strip()


def without_label(items: list[str]) -> list[str]:
    """`n=1, 3, 5` labels all of its entries at once; `x=1, y=2` each."""
    sides = split_sides(items[0])
    if len(sides) == 2 and is_name(sides[0]) and not any("=" in item for item in items[1:]):
        return [sides[1], *items[1:]]
    return items


def find_brackets(text: str) -> tuple[str, str] | None:
    r"""The brackets around a text, and what is in them: "{}" of a set, "()" of a tuple, "[)" of an
    interval.
    """
    text = re.sub(r"\\langle\s*(.*?)\s*\\rangle", r"(\1)", text)
    if text.startswith(r"\{") and text.endswith(r"\}") and _closing(text, 1) == len(text) - 1:
        return "{}", text[2:-2].strip()
    if interval := re.fullmatch(r"([\]\[(])([^\[\]()]*,[^\[\]()]*)([\[\])])", text):
        first, inside, last = interval.groups()  # ]0, 1[ is (0, 1)
        return ("[" if first == "[" else "(") + ("]" if last == "]" else ")"), inside.strip()
    if text[:1] in ("(", "[", "{") and _closing(text, 0) == len(text) - 1:
        is_set = text[0] == "{"
        return "{}" if is_set else text[0] + text[-1], text[1:-1].strip()
    return None


def split_sides(text: str) -> list[str]:
    return [side for side in _split(text, _EQUALS) if side]


def is_name(text: str) -> bool:
    r"""Whether a text is what a value is given to:

    `x`, `f(x)`, `a_{10}`, `P(X > 2)`, `\angle ABC`, words, `(x, y)`.
    """
    text = _INDEX.sub("", text.strip())
    if re.fullmatch(r"\(\s*[a-z]\s*(?:,\s*[a-z]\s*)+\)", text):
        return True
    bare = _ARGUMENTS.sub(r"\1 x", text).strip()
    if bare in _CONSTANTS or _FUNCTION.search(bare) or bare[:1] in ("", "-", "+", "/"):
        return False
    return bool(re.search(r"[A-Za-z⟩]", bare) and re.fullmatch(r"[A-Za-z\\⟨⟩{}' .\-+/]*", bare))


def split_pieces(text: str) -> list[tuple[bool, str]]:
    """Words and what stands between them, in order: whether each is words, and its text."""
    split = WORDS.split(text)
    pieces = [
        (at % 2 == 1, piece.strip(" ,.") if at % 2 else piece.strip())
        for at, piece in enumerate(split)
    ]
    return [
        (is_word, piece.lower() if is_word and len(piece) > 1 else piece)
        for is_word, piece in pieces
        if piece
    ]


def find_quantity(text: str) -> tuple[str, Fraction] | None:
    """What numbers with known units measure, and how much: 5 feet 3 inches; None of anything else.

    Of several, each unit is smaller than the one before: 3 cm, 4 cm are two lengths.
    """
    parts = re.sub(r",|⟨and⟩", " ", _with_words_apart(text))
    amounts = _AMOUNT.findall(parts)
    units = [UNITS.get(unit_of(before or behind), ("", "0")) for before, _, behind in amounts]
    sizes = [Fraction(size) for _, size in units]
    kinds = {kind for kind, _ in units}
    if _AMOUNT.sub("", parts).strip() or len(kinds) != 1 or "" in kinds:
        return None
    if any(size <= smaller for size, smaller in pairwise(sizes)):
        return None
    total = sum(
        (_fraction(amount) * size for (_, amount, _), size in zip(amounts, sizes, strict=True)),
        Fraction(),
    )
    return kinds.pop(), total


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text))


def find_choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice, and what stands behind it."""
    match = _CHOICE.fullmatch(text)
    return None if match is None else (match[1] or match[3], (match[2] or match[4] or "").strip())


def count_minutes(time: re.Match[str]) -> int:
    half = time[3] or time[4]
    hours = int(time[1]) if half is None else int(time[1]) % 12 + (12 if half.lower() == "p" else 0)
    return 60 * hours + int(time[2])
