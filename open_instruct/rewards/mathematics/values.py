"""Compare expressions, relations and sets of numbers, which math-verify reads.

Numbers, and expressions at a few points, are compared here: exact ones to 60 digits, relative to
them. math-verify compares differences to a fixed number of places, under which small numbers are
all nought.
"""

import re
from typing import Any

_MAX_EXPONENT = 20_000
_EXACT = 1e-60
_DECIMAL = 1e-12  # decimals may be rounded behind so many places
# Of variables, in the order of their names: above nought first, where roots and logarithms are
# real.
_POINTS = (
    ("3/7", "11/5", "23/13", "5/3", "29/11", "13/17"),
    ("47/19", "2/9", "31/23", "7/3", "1/13", "37/29"),
    ("-8/7", "5/9", "-19/11", "-41/13", "3/17", "-2/5"),
)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z])(?!\s*=)")
_UNREADABLE = re.compile(
    r"[⟨⟩:'%]|\^\{?\s*(?:T|\*|\\top|\\dagger|\\prime)\s*\}?(?![a-zA-Z])|\\(?:ldots|pmod|equiv)(?![a-zA-Z])"
)


# Towers of powers, and the factorial of a factorial.
_HUGE = (
    r"\^\s*\{?\s*[\d(]+\s*\^\s*\{?\s*\d*\s*\^",
    r"\d\s*\^\{\s*\d+\s*\^\{?\s*\d\d",
    r"!\s*[)}\]]*\s*!",
)


def are_same_values(ours: str, theirs: str, *, tolerance: float | None = None) -> bool:
    """Whether two cleaned expressions or relations without words are the same.

    Args:
        tolerance: of two numbers, relative to them.
    """
    is_complex = bool(_IMAGINARY.search(ours) or _IMAGINARY.search(theirs))
    one = _read(ours, is_complex=is_complex)
    other = _read(theirs, is_complex=is_complex)
    if one is None or other is None:
        return False
    has_decimals = any(re.search(r"\d\.\d", text) for text in (ours, theirs))
    number = _work_out(one)
    other_number = _work_out(other)
    if number is not None and other_number is not None:
        if tolerance is None:
            tolerance = _DECIMAL if has_decimals else _EXACT
        return _are_same_numbers(number, other_number, tolerance)
    if tolerance is not None:
        return False
    agree = [_agree_at(points, one, other) for points in _POINTS]
    if agree[0] is False or all(agree):
        return agree[0] is not False
    return _verify(one, other)


def are_same_regions(ours: str, theirs: str) -> bool | None:
    """Whether two relations of a variable, or sets of numbers, are the same; None of others."""
    import sympy

    regions = [_find_region(text) for text in (ours, theirs)]
    if any(each is None for each in regions):
        return None
    (name, one), (other_name, other) = regions  # type: ignore[misc]
    if name and other_name and name != other_name:
        return False
    try:
        return bool(
            one == other
            or sympy.SymmetricDifference(one, other).doit().is_empty
            or one.symmetric_difference(other).is_empty
        )
    except Exception:  # sympy cannot compare them
        return None


def _read(text: str, *, is_complex: bool) -> Any:
    """The value of LaTeX; None if it cannot be read whole, or takes forever to compute."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    text = _prepare(text)
    if _UNREADABLE.search(text) or _is_huge(text):
        return None
    if "\\lim" not in text and re.search(r"\\to(?![a-zA-Z])", text):
        return None
    based_number = re.fullmatch(r"([0-9A-Z]+)_\{?(\d+)\}?", text)
    try:
        if (
            based_number
            and 2 <= int(based_number[2]) <= 36
            and re.search(r"\d", based_number[1] + based_number[2])
        ):
            return sympy.Integer(int(based_number[1], int(based_number[2])))
        reading = ConversionConfig(lowercase_symbols=False)
        if not is_complex:
            return latex2sympy(
                text, is_real=True, normalization_config=None, conversion_config=reading
            )
        value = latex2sympy(text, normalization_config=None, conversion_config=reading)
        return value.subs(sympy.Symbol("i"), sympy.I)
    except Exception:  # the parser raises what it likes
        return None


def _prepare(text: str) -> str:
    """LaTeX as the parser reads it.

    Decimals become fractions, degrees in functions radians, and names of figures one name.
    """
    text = re.sub(r"(?<![\d.])(\d+)\.(\d+)", _write_fraction, text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+|\\frac\{\d+\}\{\d+\})\s*°", r"{(\\frac{\1\\pi}{180})}", text)
        text = re.sub(r"\{\((.*?)\)\}", r"(\1)", text)
    text = re.sub(
        r"\\(triangle|angle|arc|widehat|square|odot|parallelogram)\s*\{?\s*([A-Z]{1,4})\}?",
        r"\\overline{\1\2}",
        text,
    )
    text = re.sub(r"\\math(?:cal|frak|scr)\s*\{(\w)\}", r"\1", text)
    text = re.sub(r"\\lg(?![a-z])", r"\\log", text)
    return text.replace("°", "").strip()


def _write_fraction(match: re.Match[str]) -> str:
    r"""The fraction of a decimal: 0.25 is `\frac{25}{100}`."""
    whole, places = match.groups()
    return rf"\frac{{{int(whole + places)}}}{{{10 ** len(places)}}}"


def _is_huge(text: str) -> bool:
    """Whether there is a power or a factorial that takes forever to compute."""
    exponents = re.findall(r"\^\{?-?(\d{5,})", text) + re.findall(r"(\d{5,})\s*!", text)
    if any(re.search(pattern, text) for pattern in _HUGE):
        return True
    return any(int(exponent[:9]) > _MAX_EXPONENT for exponent in exponents)


def _work_out(value: Any) -> Any:
    """A value without variables, computed; None for anything else."""
    import sympy

    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return None
    if value.atoms(sympy.core.function.AppliedUndef):
        return None
    try:
        result = value.doit()
    except Exception:  # an integral without an end, for one
        return None
    if isinstance(result, sympy.Expr) and result.is_number:
        return result
    return None


def _are_same_numbers(one: Any, other: Any, tolerance: float) -> bool:
    import sympy

    if one == other and not one.has(sympy.nan, sympy.zoo):
        return True
    if one.is_Rational and other.is_Rational and tolerance < 1e-6:
        return False
    infinite = (sympy.oo, -sympy.oo, sympy.nan, sympy.zoo)
    if one.has(*infinite) or other.has(*infinite):
        return False
    try:
        value = sympy.N(one, 100)
        other_value = sympy.N(other, 100)
        largest = max(abs(value), abs(other_value))
        if abs(value - other_value) <= tolerance * largest:
            return True
        tiny = sympy.Float(10) ** -90
        smallest = min(abs(value), abs(other_value))
        if (smallest == 0 or smallest < largest * tiny) and largest < tiny:
            return bool(sympy.simplify(one - other) == 0)
        return False
    except Exception:  # they cannot be computed
        return False


def _verify(one: Any, other: Any) -> bool:
    import logging

    from math_verify import verify

    # It says at every call that there is no time limit: the process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return bool(verify(other, one, float_rounding=12, numeric_precision=60, timeout_seconds=None))


def _agree_at(points: tuple[str, ...], one: Any, other: Any) -> bool | None:
    """Whether two expressions have the same value at points; None where they have none there."""
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return None
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    if len(points) < len(names):
        return None
    try:
        at = dict(zip(names, map(sympy.Rational, points), strict=False))
        values = [sympy.N(each.doit().subs(at).doit(), 80) for each in (one, other)]
        if not all(value.is_number and value.is_finite for value in values):
            return None
        largest = max(map(abs, values))
        return bool(abs(values[0] - values[1]) <= sympy.Float(10) ** -50 * largest)
    except Exception:  # an undefined function, for one
        return None


def _find_region(text: str) -> tuple[str, Any] | None:
    r"""The variable of a relation, "" without one, and the set of its values.

    Examples of relations are `x < 2`, `x \in [1, 2)` and `(1, 2)`; None of anything else.
    """
    import sympy

    alternatives = re.split(r"⟨or⟩|\\lor|\\vee", text)
    if len(alternatives) > 1:
        regions = _list_regions(alternatives)
        names = {name for name, _ in regions or ()}
        if regions is None or len(names) != 1:
            return None
        return names.pop(), sympy.Union(*(values for _, values in regions))
    both = re.split(r"⟨and⟩|\\land|\\wedge", text)
    if len(both) == 2:
        regions = _list_regions(both)
        if regions is None or regions[0][0] != regions[1][0]:
            return None
        return regions[0][0], sympy.Intersection(regions[0][1], regions[1][1])
    member = re.fullmatch(r"([a-zA-Z]|\\[a-z]+)\s*(?:\\in(?![a-z])|=(?=\s*[\[(\]]))\s*(.+)", text)
    if member:
        inside = _find_region(member[2])
        if inside is None:
            return None
        return member[1], inside[1]
    if re.search(r"<|>|\\(?:leq|geq|neq)(?![a-z])", text):
        return _read_relation(text)
    return _read_set(text)


def _list_regions(texts: list[str]) -> list[tuple[str, Any]] | None:
    """The region of each text; None where one has none."""
    regions = []
    for text in texts:
        region = _find_region(text.strip(" ,"))
        if region is None:
            return None
        regions.append(region)
    return regions


def _read_relation(text: str) -> tuple[str, Any] | None:
    import sympy

    other_than = re.fullmatch(r"([a-zA-Z]|\\[a-z]+)\s*\\neq\s*([^,]+)", text)
    if other_than:
        value = _read(other_than[2], is_complex=False)
        if value is None:
            return None
        return other_than[1], sympy.S.Reals - sympy.FiniteSet(value)
    value = _read(text, is_complex=False)
    names = [str(symbol) for symbol in getattr(value, "free_symbols", ())]
    if len(names) != 1:
        return None
    parts = getattr(value, "_unsorted_args", (value,))
    try:
        return names[0], sympy.Intersection(*(part.doit().as_set() for part in parts))
    except Exception:  # sympy cannot solve it
        return None


def _read_set(text: str) -> tuple[str, Any] | None:
    import sympy

    text = re.sub(r"\](\s*[^\[\](),]+,[^\[\](),]+)([\[\])])", r"(\1\2", text)
    text = re.sub(r"([(\[][^\[\](),]+,[^\[\](),]+)\[", r"\1)", text)
    text = text.replace(r"+\infty", r"\infty")
    value = _read(text, is_complex=False)
    try:
        if isinstance(value, sympy.Tuple) and len(value) == 2 and text.startswith("("):
            value = sympy.Interval.open(*value)
        if not isinstance(value, sympy.Set):
            return None
        return "", value.doit()
    except Exception:  # ends that are no numbers
        return None
