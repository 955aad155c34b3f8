"""Units of quantities: their names, what they measure, and how much of it one is."""

import re

# What a unit measures, and how much of it one is; the longest name of a unit is tried first.
_TABLE = {
    "length": {"mm millimeter millimetre": "0.001", "cm centimeter centimetre": "0.01",
               "m meter metre": "1", "km kilometer kilometre": "1000",
               "in inch inches": "0.0254", "ft foot feet": "0.3048",
               "yd yard": "0.9144", "mi mile": "1609.344",},
    "time": {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400",
             "week": "604800",},
    "mass": {"mg milligram": "0.001", "g gram": "1", "kg kilogram": "1000",},
    "weight": {"oz ounce": "1", "lb pound": "16"},
    "money": {"dollar usd": "100", "cent": "1"},
    "volume": {"ml milliliter millilitre": "1", "l liter litre": "1000"},
}  # fmt: skip
UNITS: dict[str, tuple[str, str]] = {}
"""What each unit measures, and how much of it one is, by every name of the unit."""
for _kind, _units in _TABLE.items():
    for _names, _size in _units.items():
        for _name in _names.split():
            UNITS[_name] = (_kind, _size)
# Words that change what a number says, so that they are no unit which may be left out.
_CHANGES = """more less fewer least most greater larger smaller than at not minus plus times over
squared cubed mod modulo base remainder pm am dozen each factorial half halves third thirds quarter
quarters double twice to through between or and no none if when but only without except before
after"""
CHANGES = set(_CHANGES.split())
CURRENCIES = ("dollar", "euro", "pound", "usd", "rs", "rupee")  # which may stand in front


def name_unit(words: str) -> str:
    """The name of a unit in the table, or the words in the singular."""
    name = words
    if len(words) > 1:
        name = words.strip(" .").lower()
    if name in UNITS:
        return name
    power = re.fullmatch(r"(?:(square|sq|cubic|cu)\.? )?([a-z]+)(?:\^([23]))?", name)
    if power and (power[1] or power[3]) and name_unit(power[2]) in UNITS:
        kind, size = UNITS[name_unit(power[2])]
        exponent = power[3]
        if not exponent:
            exponent = {"cu": "3", "sq": "2"}[power[1][:2]]
        return f"{size} {kind}^{exponent}"
    return " ".join(map(_singular, name.split()))


def _singular(word: str) -> str:
    is_plural = len(word) > 3 and word.endswith("s") and not word.endswith("ss")
    if is_plural:
        return word[:-1]
    return word


def is_droppable(words: str) -> bool:
    """Whether words behind a number are a unit, or a noun, which an answer may leave out."""
    return not CHANGES & set(re.findall(r"[a-z]+", words.lower()))


def are_alike(words: str, others: str) -> bool:
    """Whether two units are the same, or one is said in fewer words: "apples" and "red apples"."""
    ours = set(name_unit(words).split())
    theirs = set(name_unit(others).split())
    same_unit = UNITS.get(name_unit(words), 1) == UNITS.get(name_unit(others), 2)
    return same_unit or ours <= theirs or theirs <= ours
