"""Answers of mathematics: the same expression, however it is written."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from open_instruct.verifiers.verifier import Verifier

MAX_CHARACTERS = 300
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"(?:final )?answer(?: is|:)\s*:?\s*([^\n]+)", flags=re.IGNORECASE)
_DOLLARS = re.compile(r"\$+([^$]+)\$+")
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|limits|!|,|;|:|quad|qquad|%|\$)|\\ |\$|%|°|\^\s*\{?\\circ\}?|~")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
# Nothing but these may reach the parser of sympy, which evaluates what it is given.
_NAMES = {
    "sqrt": "sqrt",
    "pi": "pi",
    "infty": "oo",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "log": "log",
    "ln": "log",
}
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log"}
_OPERATORS = {"**", "-", "+", "*", "/", "(", ","}
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|([A-Za-z]+)|(\*\*|[-+*/(),]))")


class Math(Verifier):
    """1 if the answer and the ground truth are the same expression, tuple or text.

    The answer is the last `\\boxed{…}`; without one what follows the last "answer is", or the last `$…$`. Both
    are compared as texts without layout and units, then by sympy: fractions, roots, pi, polynomials in one-letter
    symbols, tuples. What is longer than 300 characters is compared as text alone.
    """

    name: ClassVar[str] = "math"

    def score(self, completion: str, ground_truth: Any) -> float:
        answer = find_answer(completion)
        if answer is None:
            return 0.0
        expected = find_answer(str(ground_truth)) if "\\boxed" in str(ground_truth) else str(ground_truth)
        return float(expected is not None and are_equal(answer, expected))


def find_answer(completion: str) -> str | None:
    """The text of the answer, or None if there is none (or its brace is never closed)."""
    boxes = list(_BOXED.finditer(completion))
    if boxes:
        return _until_closed(completion, boxes[-1].end())
    if said := _SAID.findall(completion):
        return str(said[-1]).strip().rstrip(".")
    dollars = _DOLLARS.findall(completion)
    return str(dollars[-1]) if dollars else None


def _until_closed(text: str, start: int) -> str | None:
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None


def are_equal(answer: str, expected: str) -> bool:
    """Whether two answers say the same. May take for ever on malicious ones: call it where it can be killed."""
    ours, theirs = _plain(answer), _plain(expected)
    if ours == theirs:
        return bool(ours)
    if max(len(ours), len(theirs)) > MAX_CHARACTERS:
        return False
    left, right = _parse(ours), _parse(theirs)
    if left is None or right is None or len(left) != len(right):
        return False
    import sympy

    return all(sympy.simplify(one - other) == 0 for one, other in zip(left, right, strict=True))


def _plain(text: str) -> str:
    """Without layout; a unit in words after a number is left out, other words stay."""
    text = _DROPPED.sub("", text.replace("{,}", ""))
    without_words = _WORDS.sub("", text).strip()
    text = without_words if re.search(r"\d", without_words) else _WORDS.sub(r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"^\s*[A-Za-z]\s*=", "", text)
    return " ".join(text.strip().rstrip(".").split())


def _parse(text: str) -> list[Any] | None:
    """The expressions of a tuple (or of a single answer), or None where this is no mathematics that we know."""
    source = _to_python(text)
    if source is None:
        return None
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    try:
        parsed = parse_expr(source)
    except Exception:  # the parser runs into every kind of error on what is no expression
        return None
    parts = list(parsed) if isinstance(parsed, tuple | sympy.Tuple) else [parsed]
    return parts if all(isinstance(part, sympy.Expr) for part in parts) else None


def _to_python(text: str) -> str | None:
    """LaTeX or plain arithmetic as words that only name numbers, operators, known functions and one-letter symbols."""
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"((\1)/(\2))", text)
    # From the inside out: braces without braces in them.
    for _ in range(text.count("{")):
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\^\s*\{([^{}]*)\}", r"^(\1)", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"sqrt(\1)", text)
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\div", "/").replace("\\", " ")
    text = text.replace("^", "**").replace("[", "(").replace("]", ")")
    words: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        number, name, sign = match.groups()
        if name is not None and name not in _NAMES and len(name) > 1:
            return None
        starts_factor = sign is None or sign == "("
        if starts_factor and words and words[-1] not in _OPERATORS and words[-1] not in _FUNCTIONS:
            words.append("*")  # 2x, x(y + 1)
        # A letter by itself is a symbol, also where sympy has a constant of that name.
        words.append(number or sign or _NAMES.get(name) or f"Symbol('{name}')")
        position = match.end()
    return " ".join(words) or None
