r"""Whether two answers of mathematics are the same: what stands around math-verify.

An answer is taken apart into choices, lists, brackets, equations, quantities and words, as long as
it has any of them; what is left are expressions and relations, which math-verify reads. Each step
below knows one kind, and says nothing (None) of answers that are not of it. Malicious answers may
take forever: call `are_equal` in a process that can be killed.
"""

import re
from collections.abc import Callable, Sequence

from open_instruct.rewards.mathematics.parts import (
    WORDS,
    count_minutes,
    find_brackets,
    find_choice,
    find_quantity,
    is_name,
    split_items,
    split_pieces,
    split_sides,
    squeezed,
    unwrapped,
    without_label,
)
from open_instruct.rewards.mathematics.text import clean
from open_instruct.rewards.mathematics.units import are_alike, is_droppable, unit_of
from open_instruct.rewards.mathematics.values import are_same_regions, are_same_values

MAX_CHARACTERS = 300  # of an expression
MAX_WRITTEN = 2_000  # characters of an answer as it is written
MAX_ITEMS = 12  # of a list, in which entries may be written twice
NEAR = 1e-2  # as far as the sides of an approximation may differ, relative to them
_SEPARATOR_WORDS = re.compile(r"⟨(?:and|or)⟩|(?<=⟨)(?:and|or) (?=[^⟩]*⟩)|(?<= )(?:and|or)(?=⟩)")
_RELATION = re.compile(r"<|>|\\(?:leq|geq|neq|in|notin|cup|cap|setminus|mathbb)(?![a-zA-Z])")
_TIME = re.compile(
    r"(\d{1,2}):(\d\d)(?::\d\d)?\s*(?:⟨([ap])\.? ?m\.?⟩|([ap])\.\s*m\.?)?", re.IGNORECASE
)
_RESIDUE = re.compile(
    r"(?:([^=≡]*?)\\equiv)?\s*(.*?)\s*\(?\s*(?:\\pmod|\\mod|\\bmod|⟨mod(?:ulo)?⟩)\s*\{?([^{}()]*)\}?\)?"
)
_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}\s*[\])]?",
    re.DOTALL,
)

Verdict = bool | None


def are_equal(answer: str, expected: str) -> bool:
    """Whether two answers are equal.

    Example: `are_equal("\\frac{1}{2}\\text{ feet}", "6 inches")`.
    """
    if max(len(answer), len(expected)) > MAX_WRITTEN:
        return bool(answer.strip(" $")) and squeezed(answer) == squeezed(expected)
    ours, theirs = clean(answer), clean(expected)
    if not ours or not theirs:
        return False
    if squeezed(ours) == squeezed(theirs) or squeezed(answer) == squeezed(expected):
        return True
    return max(len(ours), len(theirs)) <= MAX_CHARACTERS and _are_same(ours, theirs)


def _are_same(ours: str, theirs: str) -> bool:
    ours, theirs = unwrapped(ours), unwrapped(theirs)
    if not ours or not theirs or squeezed(ours) == squeezed(theirs):
        return bool(ours) and squeezed(ours) == squeezed(theirs)
    for compare in STEPS:
        if (verdict := compare(ours, theirs)) is not None:
            return verdict
    return are_same_values(ours, theirs)


# --- the kinds of answers
# ---------------------------------------------------------------------------------


def _same_choices(ours: str, theirs: str) -> Verdict:
    r"""`(C)`, `C`, `\textbf{(C)}\ 7` and `7` are one choice; of two that say more, letter and rest
    count.
    """
    one, other = find_choice(ours), find_choice(theirs)
    if one is None and other is None:
        return None
    for choice, text in ((one, theirs), (other, ours)):
        if choice is not None and re.fullmatch("[A-J]", text):
            return text == choice[0]
    if one is not None and other is not None:
        return one[0] == other[0] and (not one[1] or not other[1] or _are_same(one[1], other[1]))
    rest = (one or other or ("", ""))[1]
    return bool(rest) and _are_same(rest, ours if one is None else theirs)


def _same_times(ours: str, theirs: str) -> Verdict:
    """4:30 a.m. is 4:30 and not 4:30 p.m.; 2:40 is no ratio beside 1:20."""
    one, other = _TIME.fullmatch(ours), _TIME.fullmatch(theirs)
    return None if one is None or other is None else count_minutes(one) == count_minutes(other)


def _same_ratios(ours: str, theirs: str) -> Verdict:
    r"""2:4 is 1:2, and \frac{1}{2}; 1:2:3 is 2:4:6."""
    one, other = ours.split(":"), theirs.split(":")
    if max(len(one), len(other)) == 1 or WORDS.search(ours + theirs) or "" in one + other:
        return None
    if len(one) == 2 and len(other) == 1:
        return are_same_values(rf"\frac{{{one[0]}}}{{{one[1]}}}", theirs)
    if len(one) == 1 and len(other) == 2:
        return are_same_values(ours, rf"\frac{{{other[0]}}}{{{other[1]}}}")
    crossed = (
        (rf"({a}) \cdot ({other[0]})", rf"({b}) \cdot ({one[0]})")
        for a, b in zip(one, other, strict=False)
    )
    return len(one) == len(other) and all(are_same_values(*pair) for pair in crossed)


def _same_residues(ours: str, theirs: str) -> Verdict:
    r"""`8 \pmod 5` is `x \equiv 3 \pmod{5}`; without its modulus a residue is another answer."""
    one, other = _RESIDUE.fullmatch(ours), _RESIDUE.fullmatch(theirs)
    if one is None or other is None:
        return None if one is None and other is None else False
    names = [match[1].strip() for match in (one, other) if match[1]]
    if len(set(names)) > 1 or not _are_same(one[3], other[3]):
        return False
    residues = [match[2] for match in (one, other)]
    if all(re.fullmatch(r"-?\d+", each) for each in (*residues, one[3])):
        return (int(residues[0]) - int(residues[1])) % max(int(one[3]), 1) == 0
    return _are_same(*residues)


def _same_quantities(ours: str, theirs: str) -> Verdict:
    """5 feet 3 inches is 63 inches.

    What has no unit, or units of which nothing is known, is for another step.
    """
    one, other = find_quantity(ours), find_quantity(theirs)
    return None if one is None or other is None else one == other


def _same_sets_of_numbers(ours: str, theirs: str) -> Verdict:
    r"""`x > 2`, `(2, \infty)` and `x \in (2,\infty)` are one set; `x > 2` and `y > 2` are not."""
    if not (_RELATION.search(ours) or _RELATION.search(theirs)) or WORDS.search(
        _SEPARATOR_WORDS.sub("", ours + theirs)
    ):
        return None
    return are_same_regions(ours, theirs)


def _same_lists(ours: str, theirs: str) -> Verdict:
    r"""`1, 2 and 3` in any order; in its own where there are dots, or beside a tuple;

    `\pm 2` is a list of two.
    """
    one, other = split_items(ours), split_items(theirs)
    if len(one) == 1 and len(other) == 1:
        return None
    kinds = [find_brackets(text) for text in (ours, theirs)]
    lists = [
        items if kind is None else split_items(kind[1])
        for items, kind in zip((one, other), kinds, strict=True)
    ]
    opens = [kind[0] for kind in kinds if kind is not None]
    lists = [without_label(items) for items in lists]
    has_order = any("(" in each for each in opens) or any(
        r"\ldots" in item for items in lists for item in items
    )
    if any("[" in each for each in opens):
        return False
    labels = [[item.partition("=")[0] for item in items if "=" in item] for items in lists]
    is_half_labelled = [len(set(each)) > 1 for each in labels].count(True) == 1
    return _match(*lists, has_order=has_order or is_half_labelled)


def _same_equations(ours: str, theirs: str) -> Verdict:
    r"""`x = 4` is `4` and not `y = 4`; of `\frac{22}{7} \approx 3.14` either side will do, if they
    are near.
    """
    one, other = split_sides(ours), split_sides(theirs)
    if len(one) == 1 and len(other) == 1:
        return None
    if len(one) > 1 and len(other) > 1:
        names = [squeezed(sides[0]) if is_name(sides[0]) else "" for sides in (one, other)]
        if not all(names):
            return None
        are_functions = {"y"} < {*names} and any(
            re.fullmatch(r"[a-z]\([a-z]\)", name) for name in names
        )
        same_names = names[0] == names[1] or are_functions
        return same_names and any(_are_same(a, b) for a in _values(one) for b in _values(other))
    sides, value = (one, theirs) if len(one) > 1 else (other, ours)
    return any(_are_same(each, value) for each in _values(sides))


def _same_brackets(ours: str, theirs: str) -> Verdict:
    r"""Tuples and intervals have their brackets and their order, sets have neither;

    `\{1\}` is 1, and (1, 2) no set.
    """
    one, other = find_brackets(ours), find_brackets(theirs)
    if one is None and other is None:
        return None
    if one is None or other is None:
        kind, inside = one or other or ("", "")
        # The set that has the empty set is not empty.
        is_of_empty = squeezed(inside) == r"\emptyset"
        return kind == "{}" and not is_of_empty and _are_same(inside, theirs if one else ours)
    lists = split_items(one[1]), split_items(other[1])
    if one[0] == "{}" and other[0] == "{}":
        return _match(*map(_distinct, lists), has_order=False)
    return one[0] == other[0] and _match(*lists, has_order=True)


def _same_matrices(ours: str, theirs: str) -> Verdict:
    """Cell by cell, whichever brackets stand around them."""
    one, other = _MATRIX.fullmatch(ours), _MATRIX.fullmatch(theirs)
    are_determinants = "vmatrix" in (ours + theirs).lower()
    if are_determinants or (one is None and other is None):
        return None
    if one is None or other is None:
        return False
    rows = [
        [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
        for match in (one, other)
    ]
    cells = [[cell.strip() for row in each for cell in row] for each in rows]
    shapes = [[len(row) for row in each] for each in rows]
    return shapes[0] == shapes[1] and all(map(_are_same, *cells))


def _same_percentages(ours: str, theirs: str) -> Verdict:
    """28% is 28, and 0.28; 0.28% is not 28%."""
    if not (ours.endswith("%") or theirs.endswith("%")):
        return None
    one, other = ours.rstrip("% "), theirs.rstrip("% ")
    if _are_same(one, other):
        return ours.endswith("%") == theirs.endswith("%") or not WORDS.search(ours + theirs)
    if ours.endswith("%") and theirs.endswith("%"):
        return False
    part, whole = (one, other) if ours.endswith("%") else (other, one)
    return not WORDS.search(part + whole) and are_same_values(rf"\frac{{{part}}}{{100}}", whole)


def _same_degrees(ours: str, theirs: str) -> Verdict:
    r"""45° is 45, and \frac{\pi}{4}; within a function degrees are what they are."""
    has_function = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", ours + theirs)
    if (
        has_function
        or not (ours.endswith("°") or theirs.endswith("°"))
        or "°" in ours[:-1] + theirs[:-1]
    ):
        return None
    one, other = ours.rstrip("° "), theirs.rstrip("° ")
    if _are_same(one, other):
        return True
    if ours.endswith("°") and theirs.endswith("°"):
        return False
    part, whole = (one, other) if ours.endswith("°") else (other, one)
    return not WORDS.search(part + whole) and are_same_values(
        rf"\frac{{({part})\pi}}{{180}}", whole
    )


def _same_words(ours: str, theirs: str) -> Verdict:
    """Numbers and words in turn, each the same; a unit behind a single number, or its currency, may
    be missing.
    """
    one, other = split_pieces(ours), split_pieces(theirs)
    if not any(is_word for is_word, _ in one + other):
        return None
    if [is_word for is_word, _ in one] == [is_word for is_word, _ in other]:
        is_one_number = len(one) == 2
        return all(
            (is_one_number and are_alike(a, b) and is_droppable(a + " " + b))
            or unit_of(a) == unit_of(b)
            if is_word
            else _are_same(a, b)
            for (is_word, a), (_, b) in zip(one, other, strict=True)
        )
    long, short = (one, other) if len(one) > len(other) else (other, one)
    if len(long) != 2 or len(short) != 1 or short[0][0]:
        return False
    (words,) = (text for is_word, text in long if is_word)
    (number,) = (text for is_word, text in long if not is_word)
    is_unit = not long[0][0] or unit_of(words).split()[0] in (
        "dollar",
        "euro",
        "pound",
        "usd",
        "rs",
        "rupee",
    )
    return is_unit and is_droppable(words) and _are_same(number, short[0][1])


def _same_spaced_units(ours: str, theirs: str) -> Verdict:
    """`5 m` is 5, where that has no letters; `5m` and `5 x` are not, as they may be products."""
    for one, other in ((ours, theirs), (theirs, ours)):
        unit = re.fullmatch(r"(-?[\d.]+) ([mghsLlNJWVA])(?:\^\{?[23]\}?)?", one)
        if unit and re.fullmatch(r"-?[\d./]+|-?\\frac\{\d+\}\{\d+\}", other):
            return _are_same(unit[1], other)
    return None


def _distinct(items: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for item in items:
        if not any(_are_same(item, other) for other in kept):
            kept.append(item)
    return kept


def _match(ours: Sequence[str], theirs: Sequence[str], *, has_order: bool) -> bool:
    """Whether each entry of one list is one of the other."""
    if has_order or len(ours) == len(theirs):
        return len(ours) == len(theirs) and (_match_in_order if has_order else _match_in_any_order)(
            ours, theirs
        )
    if max(len(ours), len(theirs)) > MAX_ITEMS:
        return False
    one, other = _distinct(ours), _distinct(theirs)  # "1/2 or 0.5" is one answer
    return len(one) == len(other) and _match_in_any_order(one, other)


def _match_in_order(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return all(map(_are_same, ours, theirs))


def _match_in_any_order(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    left = list(theirs)
    for item in ours:
        alike = sorted(left, key=lambda other: squeezed(other) != squeezed(item))
        found = next((other for other in alike if _are_same(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _values(sides: Sequence[str]) -> list[str]:
    """The sides of an equation that say what something is: none where they contradict each
    other.
    """
    values = [side for side in sides if not is_name(side)]
    if len(values) == len(sides) and any(
        re.search("[a-zA-Z⟨]", re.sub(r"\\[a-z]+", "", side)) for side in sides
    ):
        return []  # a relation of variables, which says no value
    are_near = all(
        _are_same(values[0], each) or are_same_values(values[0], each, tolerance=NEAR)
        for each in values[1:]
    )
    return values if are_near else []


STEPS: tuple[Callable[[str, str], Verdict], ...] = (
    _same_matrices,
    _same_choices,
    _same_times,
    _same_ratios,
    _same_residues,
    _same_quantities,
    _same_sets_of_numbers,
    _same_lists,
    _same_equations,
    _same_brackets,
    _same_percentages,
    _same_degrees,
    _same_words,
    _same_spaced_units,
)
