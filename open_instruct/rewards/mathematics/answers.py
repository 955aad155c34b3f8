r"""Compare two answers of mathematics, by rules around math-verify.

An answer is taken apart into choices, lists, brackets, equations, quantities and words, as long as
it has any; math-verify reads the rest. Each step below knows one kind, and says nothing (None) of
other answers. Malicious answers may take forever: call `are_equal` in a process that can be killed.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain

from open_instruct.rewards.mathematics.parts import (
    WORDS,
    are_same_names,
    count_minutes,
    find_brackets,
    find_choice,
    find_quantity,
    find_rows,
    has_labels,
    has_variables,
    is_name,
    put_equal_first,
    remove_label,
    split_items,
    split_pieces,
    split_sides,
    squeeze,
    unwrap,
)
from open_instruct.rewards.mathematics.text import clean
from open_instruct.rewards.mathematics.units import CURRENCIES, are_alike, is_droppable, name_unit
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

Verdict = bool | None


def are_equal(answer: str, expected: str) -> bool:
    """Whether two answers are equal.

    Example: `are_equal("\\frac{1}{2}\\text{ feet}", "6 inches")`.
    """
    if max(len(answer), len(expected)) > MAX_WRITTEN:
        return bool(answer.strip(" $")) and squeeze(answer) == squeeze(expected)
    ours = clean(answer)
    theirs = clean(expected)
    if not ours or not theirs:
        return False
    if squeeze(ours) == squeeze(theirs) or squeeze(answer) == squeeze(expected):
        return True
    return max(len(ours), len(theirs)) <= MAX_CHARACTERS and _are_same(ours, theirs)


def _are_same(ours: str, theirs: str) -> bool:
    ours = unwrap(ours)
    theirs = unwrap(theirs)
    if not ours or not theirs:
        return False
    if squeeze(ours) == squeeze(theirs):
        return True
    for compare in STEPS:
        verdict = compare(ours, theirs)
        if verdict is not None:
            return verdict
    return are_same_values(ours, theirs)


# --- the kinds of answers ---


def _same_choices(ours: str, theirs: str) -> Verdict:
    r"""`(C)`, `C`, `\textbf{(C)}\ 7` and `7` are one choice.

    Of two that say more, letter and rest count.
    """
    one = find_choice(ours)
    other = find_choice(theirs)
    for choice, text in ((one, theirs), (other, ours)):
        if choice is not None and re.fullmatch("[A-J]", text):
            return text == choice[0]
    if one is not None and other is not None:
        if one[0] != other[0]:
            return False
        return not one[1] or not other[1] or _are_same(one[1], other[1])
    if one is not None:
        return bool(one[1]) and _are_same(one[1], theirs)
    if other is not None:
        return bool(other[1]) and _are_same(other[1], ours)
    return None


def _same_times(ours: str, theirs: str) -> Verdict:
    """4:30 a.m. is 4:30 and not 4:30 p.m.; 2:40 is no ratio beside 1:20."""
    one = _TIME.fullmatch(ours)
    other = _TIME.fullmatch(theirs)
    if one is None or other is None:
        return None
    return count_minutes(one) == count_minutes(other)


def _same_ratios(ours: str, theirs: str) -> Verdict:
    r"""2:4 is 1:2, and \frac{1}{2}; 1:2:3 is 2:4:6."""
    one = ours.split(":")
    other = theirs.split(":")
    if max(len(one), len(other)) == 1 or WORDS.search(ours + theirs) or "" in one + other:
        return None
    if len(one) == 2 and len(other) == 1:
        return are_same_values(rf"\frac{{{one[0]}}}{{{one[1]}}}", theirs)
    if len(one) == 1 and len(other) == 2:
        return are_same_values(ours, rf"\frac{{{other[0]}}}{{{other[1]}}}")
    if len(one) != len(other):
        return False
    for term, other_term in zip(one, other, strict=True):
        product = rf"({term}) \cdot ({other[0]})"
        if not are_same_values(product, rf"({other_term}) \cdot ({one[0]})"):
            return False
    return True


def _same_residues(ours: str, theirs: str) -> Verdict:
    r"""`8 \pmod 5` is `x \equiv 3 \pmod{5}`; without its modulus a residue is another answer."""
    one = _RESIDUE.fullmatch(ours)
    other = _RESIDUE.fullmatch(theirs)
    if one is None and other is None:
        return None
    if one is None or other is None:
        return False
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
    one = find_quantity(ours)
    other = find_quantity(theirs)
    if one is None or other is None:
        return None
    return one == other


def _same_sets_of_numbers(ours: str, theirs: str) -> Verdict:
    r"""`x > 2`, `(2, \infty)` and `x \in (2,\infty)` are one set; `x > 2` and `y > 2` are not."""
    has_relation = _RELATION.search(ours) or _RELATION.search(theirs)
    if not has_relation or WORDS.search(_SEPARATOR_WORDS.sub("", ours + theirs)):
        return None
    return are_same_regions(ours, theirs)


def _same_lists(ours: str, theirs: str) -> Verdict:
    r"""`1, 2 and 3` in any order; in its own where there are dots, or beside a tuple.

    `\pm 2` is a list of two.
    """
    one = split_items(ours)
    other = split_items(theirs)
    if len(one) == 1 and len(other) == 1:
        return None
    lists = []
    brackets = ""
    for text, items in ((ours, one), (theirs, other)):
        kind = find_brackets(text)
        if kind is not None:
            brackets += kind[0]
            items = split_items(kind[1])
        lists.append(remove_label(items))
    if "[" in brackets:
        return False
    has_dots = any(r"\ldots" in item for item in [*lists[0], *lists[1]])
    are_labelled = [has_labels(items) for items in lists]
    has_order = "(" in brackets or has_dots or are_labelled.count(True) == 1
    return _match(*lists, has_order=has_order)


def _same_equations(ours: str, theirs: str) -> Verdict:
    r"""`x = 4` is `4` and not `y = 4`.

    Of `\frac{22}{7} \approx 3.14` either side will do, if they are near.
    """
    one = split_sides(ours)
    other = split_sides(theirs)
    if len(one) == 1 and len(other) == 1:
        return None
    if len(one) == 1:
        return any(_are_same(value, ours) for value in _list_values(other))
    if len(other) == 1:
        return any(_are_same(value, theirs) for value in _list_values(one))
    if not is_name(one[0]) or not is_name(other[0]):
        return None
    if not are_same_names(squeeze(one[0]), squeeze(other[0])):
        return False
    other_values = _list_values(other)
    for value in _list_values(one):
        if any(_are_same(value, other_value) for other_value in other_values):
            return True
    return False


def _same_brackets(ours: str, theirs: str) -> Verdict:
    r"""Tuples and intervals have their brackets and their order, sets have neither.

    `\{1\}` is 1, and (1, 2) no set.
    """
    one = find_brackets(ours)
    other = find_brackets(theirs)
    if one is not None and other is None:
        return _is_in_set(one, theirs)
    if one is None and other is not None:
        return _is_in_set(other, ours)
    if one is None or other is None:
        return None
    items = split_items(one[1])
    other_items = split_items(other[1])
    if one[0] == "{}" and other[0] == "{}":
        return _match(_drop_repeats(items), _drop_repeats(other_items), has_order=False)
    return one[0] == other[0] and _match(items, other_items, has_order=True)


def _is_in_set(brackets: tuple[str, str], text: str) -> bool:
    """Whether a text is the one member of what `find_brackets` has found, which is a set."""
    kind, inside = brackets
    if kind != "{}" or squeeze(inside) == r"\emptyset":  # the set of the empty set is not empty
        return False
    return _are_same(inside, text)


def _same_matrices(ours: str, theirs: str) -> Verdict:
    """Cell by cell, whichever brackets stand around them."""
    are_determinants = "vmatrix" in (ours + theirs).lower()
    rows = find_rows(ours)
    other_rows = find_rows(theirs)
    if are_determinants or (rows is None and other_rows is None):
        return None
    if rows is None or other_rows is None:
        return False
    if [len(row) for row in rows] != [len(row) for row in other_rows]:
        return False
    return all(map(_are_same, chain(*rows), chain(*other_rows)))


def _same_percentages(ours: str, theirs: str) -> Verdict:
    """28% is 28, and 0.28; 0.28% is not 28%."""
    if not (ours.endswith("%") or theirs.endswith("%")):
        return None
    one = ours.rstrip("% ")
    other = theirs.rstrip("% ")
    if _are_same(one, other):
        return ours.endswith("%") == theirs.endswith("%") or not WORDS.search(ours + theirs)
    if ours.endswith("%") and theirs.endswith("%"):
        return False
    if WORDS.search(one + other):
        return False
    if ours.endswith("%"):
        return are_same_values(rf"\frac{{{one}}}{{100}}", other)
    return are_same_values(rf"\frac{{{other}}}{{100}}", one)


def _same_degrees(ours: str, theirs: str) -> Verdict:
    r"""45° is 45, and \frac{\pi}{4}; within a function degrees are what they are."""
    has_function = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", ours + theirs)
    if has_function or "°" in ours[:-1] + theirs[:-1]:
        return None
    if not ours.endswith("°") and not theirs.endswith("°"):
        return None
    one = ours.rstrip("° ")
    other = theirs.rstrip("° ")
    if _are_same(one, other):
        return True
    if ours.endswith("°") and theirs.endswith("°"):
        return False
    if WORDS.search(one + other):
        return False
    if ours.endswith("°"):
        return are_same_values(rf"\frac{{({one})\pi}}{{180}}", other)
    return are_same_values(rf"\frac{{({other})\pi}}{{180}}", one)


def _same_words(ours: str, theirs: str) -> Verdict:
    """Numbers and words in turn, each the same.

    A unit behind a single number, or its currency, may be missing.
    """
    one = split_pieces(ours)
    other = split_pieces(theirs)
    if not any(is_words for is_words, _ in one + other):
        return None
    if [is_words for is_words, _ in one] == [is_words for is_words, _ in other]:
        return _match_pieces(one, other)
    short, long = sorted((one, other), key=len)
    if len(long) != 2 or len(short) != 1 or short[0][0]:
        return False
    (words,) = (text for is_words, text in long if is_words)
    (number,) = (text for is_words, text in long if not is_words)
    is_unit = not long[0][0] or name_unit(words).split()[0] in CURRENCIES
    return is_unit and is_droppable(words) and _are_same(number, short[0][1])


def _match_pieces(ours: Sequence[tuple[bool, str]], theirs: Sequence[tuple[bool, str]]) -> bool:
    """Whether pieces are the same in turn, each of which is words, or a number, in both."""
    is_one_number = len(ours) == 2
    for (is_words, text), (_, other) in zip(ours, theirs, strict=True):
        if is_words:
            is_unit = is_one_number and are_alike(text, other) and is_droppable(f"{text} {other}")
            is_same = is_unit or name_unit(text) == name_unit(other)
        else:
            is_same = _are_same(text, other)
        if not is_same:
            return False
    return True


def _same_spaced_units(ours: str, theirs: str) -> Verdict:
    """`5 m` is 5, where that has no letters; `5m` and `5 x` are not, as they may be products."""
    for one, other in ((ours, theirs), (theirs, ours)):
        unit = re.fullmatch(r"(-?[\d.]+) ([mghsLlNJWVA])(?:\^\{?[23]\}?)?", one)
        if unit and re.fullmatch(r"-?[\d./]+|-?\\frac\{\d+\}\{\d+\}", other):
            return _are_same(unit[1], other)
    return None


def _drop_repeats(items: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for item in items:
        if not any(_are_same(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _match(ours: Sequence[str], theirs: Sequence[str], *, has_order: bool) -> bool:
    """Whether each entry of one list is one of the other."""
    if len(ours) == len(theirs):
        if has_order:
            return all(map(_are_same, ours, theirs))
        return _match_in_any_order(ours, theirs)
    if has_order or max(len(ours), len(theirs)) > MAX_ITEMS:
        return False
    one = _drop_repeats(ours)  # "1/2 or 0.5" is one answer
    other = _drop_repeats(theirs)
    return len(one) == len(other) and _match_in_any_order(one, other)


def _match_in_any_order(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    candidates_left = list(theirs)
    for item in ours:
        candidates = put_equal_first(candidates_left, item)
        same_item = next((other for other in candidates if _are_same(item, other)), None)
        if same_item is None:
            return False
        candidates_left.remove(same_item)
    return True


def _list_values(sides: Sequence[str]) -> list[str]:
    """The sides of an equation that are values; none where they contradict each other."""
    values = [side for side in sides if not is_name(side)]
    if len(values) == len(sides) and any(map(has_variables, sides)):
        return []  # a relation of variables, which says no value
    for value in values[1:]:
        first = values[0]
        if not (_are_same(first, value) or are_same_values(first, value, tolerance=NEAR)):
            return []
    return values


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
