"""Take a cleaned answer of mathematics apart: entries, brackets, sides, words, quantities."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from open_instruct.rewards.mathematics.units import UNITS, name_unit

_OPENS = "([{"
_CLOSES = ")]}"
WORDS = re.compile(r"⟨([^⟩]*)⟩")
_CHOICE = re.compile(r"\(([A-J])\)\s*(.*)|([A-J])[).:]\s+(.+)", re.DOTALL)
_CONSTANTS = {"e", "i", r"\pi", r"\infty"}
_INDEX = re.compile(r"_\{[^{}]*\}|_\w|\^\{?-1\}?|'")
_ARGUMENTS = re.compile(
    r"(?<=[A-Za-z⟩}])\s*\([^()]*\)|\|([A-Za-z]+)\||\\(?:overline|vec|hat|angle|triangle|overrightarrow)(?![a-z])"
)
_FUNCTION = re.compile(r"\\(?:sqrt|pi|infty|sin|cos|tan|log|ln)(?![a-z])")
_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}\s*[\])]?",
    re.DOTALL,
)
_AMOUNT = re.compile(
    r"(?:⟨(dollars)⟩\s*)?(-?\d+(?:\.\d+)?|-?\\frac\{\d+\}\{[1-9]\d*\})\s*(?:⟨([^⟩]*)⟩)?"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_COMMAS = re.compile(
    r"[,;]\s*⟨(?:and|or)⟩|[,;]|⟨(?:and|or)⟩|\\(?:text)?(?:and|lor|land|vee)(?![a-zA-Z])"
)
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx(?![a-zA-Z])|\\equiv(?![a-zA-Z])|:=")


def squeeze(text: str) -> str:
    """The text without spaces that say nothing; words in lower case."""
    text = WORDS.sub(lambda match: f"⟨{match[1].lower().strip(' .')}⟩", text)
    text = re.sub(r"\s+", " ", text.replace("$", "")).strip()
    return re.sub(r"(?<![\w.]) | (?![\w.])|(?<=\\[a-zA-Z]) (?=\d)", "", text)


def unwrap(text: str) -> str:
    """The text without brackets around all of it that only group."""
    text = text.strip()
    while text[:1] in ("(", "{"):
        is_whole = _find_closing(text, 0) == len(text) - 1
        if not is_whole or len(split_items(text[1:-1])) > 1:
            break
        if re.fullmatch(r"\([A-J]\)", text):
            return text
        text = text[1:-1].strip()
    return text


def _find_closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed, by any bracket; -1 if it is not."""
    depth = 0
    for position in range(start, len(text)):
        depth += _change_depth(text[position])
        if depth == 0:
            return position
    return -1


def _change_depth(letter: str) -> int:
    """1 at a bracket that opens, and -1 at one that closes."""
    if letter in _OPENS:
        return 1
    if letter in _CLOSES:
        return -1
    return 0


def _split_at_top(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The pieces of a text between matches of a pattern that stand in no brackets."""
    if r"\begin" in text:
        return [text.strip()]
    depths = [0]
    for letter in text:
        depths.append(depths[-1] + _change_depth(letter))
    pieces = []
    start = 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


def split_items(text: str) -> list[str]:
    """The entries of a list, of which plus or minus makes two."""
    entries = []
    for item in _split_at_top(_separate_words(text), _COMMAS):
        has_both = _PLUS_MINUS.search(item) and not _PLUS_MINUS.fullmatch(item)
        if has_both:
            entries += [_choose_sign(item, "+"), _choose_sign(item, "-")]
        else:
            entries.append(item)
    return [entry for entry in entries if entry] or [text]


def _separate_words(text: str) -> str:
    """The text with "and" and "or" as words by themselves."""
    text = re.sub(r"⟨(and|or) ([^⟩]*)⟩", r"⟨\1⟩⟨\2⟩", text)
    return re.sub(r"⟨([^⟩]*) (and|or)⟩", r"⟨\1⟩⟨\2⟩", text)


def _choose_sign(text: str, sign: str) -> str:
    """The text with one sign for plus or minus, and the other for minus or plus."""
    other_sign = {"+": "-", "-": "+"}[sign]
    signs = {"p": sign, "m": other_sign}
    return _PLUS_MINUS.sub(lambda match: signs[match[0][1]], text).removeprefix("+").strip()


def remove_label(items: list[str]) -> list[str]:
    """The entries of a list without a label that all of them share: `n=1, 3, 5`."""
    sides = split_sides(items[0])
    if len(sides) == 2 and is_name(sides[0]) and not any("=" in item for item in items[1:]):
        return [sides[1], *items[1:]]
    return items


def find_brackets(text: str) -> tuple[str, str] | None:
    r"""The brackets around a text, and what is in them.

    They are "{}" of a set, "()" of a tuple, "[)" of an interval; None where there are none.
    """
    text = re.sub(r"\\langle\s*(.*?)\s*\\rangle", r"(\1)", text)
    if text.startswith(r"\{") and text.endswith(r"\}") and _find_closing(text, 1) == len(text) - 1:
        return "{}", text[2:-2].strip()
    interval = re.fullmatch(r"([\]\[(])([^\[\]()]*,[^\[\]()]*)([\[\])])", text)
    if interval:
        first, inside, last = interval.groups()  # ]0, 1[ is (0, 1)
        opening = "[" if first == "[" else "("
        closing = "]" if last == "]" else ")"
        return opening + closing, inside.strip()
    if text[:1] in ("(", "[", "{") and _find_closing(text, 0) == len(text) - 1:
        brackets = text[0] + text[-1]
        if text[0] == "{":
            brackets = "{}"
        return brackets, text[1:-1].strip()
    return None


def split_sides(text: str) -> list[str]:
    return [side for side in _split_at_top(text, _EQUALS) if side]


def is_name(text: str) -> bool:
    r"""Whether a text is a name for a value: `x`, `f(x)`, `a_{10}`, `\angle ABC`, `(x, y)`."""
    text = _INDEX.sub("", text.strip())
    if re.fullmatch(r"\(\s*[a-z]\s*(?:,\s*[a-z]\s*)+\)", text):
        return True
    bare = _ARGUMENTS.sub(r"\1 x", text).strip()
    if bare in _CONSTANTS or _FUNCTION.search(bare) or bare[:1] in ("", "-", "+", "/"):
        return False
    return bool(re.search(r"[A-Za-z⟩]", bare) and re.fullmatch(r"[A-Za-z\\⟨⟩{}' .\-+/]*", bare))


def has_labels(items: Sequence[str]) -> bool:
    """Whether the entries have labels that differ: x=1, y=2."""
    labels = {item.partition("=")[0] for item in items if "=" in item}
    return len(labels) > 1


def are_same_names(name: str, other: str) -> bool:
    """Whether two names are equal, or are y and a function such as f(x)."""
    if name == other:
        return True
    has_function = any(re.fullmatch(r"[a-z]\([a-z]\)", each) for each in (name, other))
    return "y" in (name, other) and has_function


def find_rows(text: str) -> list[list[str]] | None:
    """The cells of each row of a matrix, whichever brackets stand around it; None of others."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row.split("&") for row in match[2].split(r"\\") if row.strip()]
    return [[cell.strip() for cell in row] for row in rows]


def put_equal_first(texts: Sequence[str], text: str) -> list[str]:
    """The texts, those first that are written as `text` is."""
    squeezed = squeeze(text)
    return sorted(texts, key=lambda other: squeeze(other) != squeezed)


def has_variables(text: str) -> bool:
    """Whether a side of an equation has letters or words that are no commands."""
    return re.search("[a-zA-Z⟨]", re.sub(r"\\[a-z]+", "", text)) is not None


def split_pieces(text: str) -> list[tuple[bool, str]]:
    """Words and what stands between them, in order: whether each is words, and its text."""
    pieces = []
    for number, piece in enumerate(WORDS.split(text)):
        is_words = number % 2 == 1
        if not is_words:
            piece = piece.strip()
        else:
            piece = piece.strip(" ,.")
            if len(piece) > 1:
                piece = piece.lower()
        if piece:
            pieces.append((is_words, piece))
    return pieces


def find_quantity(text: str) -> tuple[str, Fraction] | None:
    """What numbers with known units measure, and how much: 5 feet 3 inches.

    None of anything else. Of several, each unit is smaller than the one before: 3 cm, 4 cm are two
    lengths.
    """
    parts = re.sub(r",|⟨and⟩", " ", _separate_words(text))
    amounts = _AMOUNT.findall(parts)
    units = [UNITS.get(name_unit(before or behind), ("", "0")) for before, _, behind in amounts]
    sizes = [Fraction(size) for _, size in units]
    kinds = {kind for kind, _ in units}
    if _AMOUNT.sub("", parts).strip() or len(kinds) != 1 or "" in kinds:
        return None
    if any(size <= smaller for size, smaller in pairwise(sizes)):
        return None
    total = Fraction()
    for (_, amount, _), size in zip(amounts, sizes, strict=True):
        total += _read_fraction(amount) * size
    return kinds.pop(), total


def _read_fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text))


def find_choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice, and what stands behind it."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter = match[1] or match[3]
    text_behind = match[2] or match[4] or ""
    return letter, text_behind.strip()


def count_minutes(time: re.Match[str]) -> int:
    """The minutes since midnight of a time such as 4:30 p.m."""
    half = time[3] or time[4]
    hours = int(time[1])
    if half is not None:
        hours %= 12
        if half.lower() == "p":
            hours += 12
    return 60 * hours + int(time[2])
