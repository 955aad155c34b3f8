"""Answers of mathematics: the same expression, however it is written."""

import re
from typing import Any, ClassVar

from open_instruct.verifiers.verifier import Verifier

MAX_CHARACTERS = 300
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"(?:final )?answer(?: is|:)\s*:?\s*([^\n]+)", flags=re.IGNORECASE)
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")
_DOLLARS = re.compile(r"\$+([^$]+)\$+")
_DROPPED = re.compile(
    r"\\(?:left(?![a-z])|right(?![a-z])|displaystyle|limits|degree|!|,|;|:|quad|qquad|%|\$)|(?<!\\)\\ "
    r"|\$|%|°|\^\s*\{?\\circ\}?|~"
)
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_UNITS = re.compile(_WORDS.pattern + r"(?:\s*\^\s*\{?\d\}?)?")
# Shorter words may be products of symbols.
_PLAIN_UNITS = re.compile(
    r"((?:\\frac|\\sqrt|\\pi|[^A-Za-z\\])*\d[^A-Za-z\\]*?)"
    r"(\s+(?:[A-Za-z]{3,}|in)[A-Za-z\s/.]*|\s*(?:mm|cm|km|kg|ft|mph))(?:\^\{?\d\}?)?"
)
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
_NAMED = re.compile(r"(?:^|(?<=,))\s*([A-Za-z])(?:\([A-Za-z]\))?\s*(?:=|\\in(?![a-z]))")
_MATRIX = re.compile(r"\\begin\{[bp]?matrix\}(.*)\\end\{[bp]?matrix\}", flags=re.DOTALL)
_RELATIONS = {r"\\leq?(?![a-z])|≤": "<=", r"\\geq?(?![a-z])|≥": ">=", r"\\lt(?![a-z])": "<", r"\\gt(?![a-z])": ">"}
_UNORDERED = {"list", "union"}
# Only these may reach sympy's parser, which evaluates its input as Python.
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log"}
_NAMES = {name: name for name in (*_FUNCTIONS, "pi")} | {"infty": "oo", "ln": "log"}
_OPERATORS = {"**", "-", "+", "*", "/", "("}
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|([A-Za-z]+)|(\*\*|[-+*/()]))")


class Math(Verifier):
    """1 if the answer and the ground truth are the same expression, tuple, interval, list, matrix, relation or text.

    The answer is the last `\\boxed{…}`; without one what follows the last "answer is", or the last `$…$`. Both
    are compared as texts without layout and units, then part by part with sympy: fractions, mixed numbers, roots, pi,
    polynomials in one-letter symbols. Brackets must be of the same kind; lists, sets and unions have no order, and
    a ± b is a list of two. What is longer than 300 characters is compared as text alone.
    """

    name: ClassVar[str] = "math"

    def score(self, completion: str, ground_truth: Any) -> float:
        answer = find_answer(completion)
        if answer is None:
            return 0.0
        expected = find_answer(str(ground_truth)) if "\\boxed" in str(ground_truth) else str(ground_truth)
        return float(expected is not None and are_equal(answer, expected))


class StrictMath(Math):
    """The same, of an answer written as "Final Answer: The final answer is … . I hope it is correct."

    Without that sentence the answer is the whole completion.
    """

    name: ClassVar[str] = "strict_math"

    def score(self, completion: str, ground_truth: Any) -> float:
        said = _FINAL.search(completion + "I hope it is correct.")
        return float(are_equal(said[1] if said else completion, str(ground_truth)))


def find_answer(completion: str) -> str | None:
    """The text of the answer, or None if there is none (or its brace is never closed)."""
    boxes = list(_BOXED.finditer(completion))
    if boxes:
        start = boxes[-1].end()
        end = _closed_at(completion, start - 1, "{", "}")
        return None if end is None else completion[start:end]
    if answers := _SAID.findall(completion):
        return str(answers[-1]).strip().rstrip(".")
    dollars = _DOLLARS.findall(completion)
    return str(dollars[-1]) if dollars else None


def _closed_at(text: str, start: int, opening: str = "([{", closing: str = ")]}") -> int | None:
    """The index of the bracket that closes the one at `start`, of any kind in `closing`; None if there is none."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in opening) - (text[index] in closing)
        if depth == 0:
            return index
    return None


def are_equal(answer: str, expected: str) -> bool:
    """Whether two answers are equal. Malicious ones may take forever: call it in a process that can be killed."""
    if max(len(answer), len(expected)) > MAX_CHARACTERS:
        return answer.split() == expected.split()
    ours = _plain(answer)
    theirs = _plain(expected)
    return bool(ours) and bool(theirs) and _are_equal(ours, theirs)


def _are_equal(one: str, other: str) -> bool:
    if _key(one) == _key(other):
        return True
    kind, parts = _parts(one)
    other_kind, other_parts = _parts(other)
    if kind != other_kind or len(parts) != len(other_parts):
        return False
    if kind == "expression":
        left = _parse(one)
        right = _parse(other)
        if left is None or right is None:
            return False
        import sympy

        return bool(left == right or sympy.simplify(left - right) == 0)
    if kind not in _UNORDERED:
        return all(map(_are_equal, parts, other_parts))
    for part in parts:
        match = next((index for index, other in enumerate(other_parts) if _are_equal(part, other)), None)
        if match is None:
            return False
        del other_parts[match]
    return True


def _plain(text: str) -> str:
    """The text without layout, without units behind a number, and without "x =" before values. Other words stay."""
    text = _DROPPED.sub("", text.replace("{,}", ""))
    for pattern, sign in _RELATIONS.items():
        text = re.sub(pattern, sign, text)
    text = _AND.sub(", ", text)
    without_words = _UNITS.sub("", text).strip()
    text = without_words if re.search(r"\d", without_words) else _WORDS.sub(r"\1", text)
    if not re.match(r"\s*(?:\(|\[|\\\{)", text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if len(set(_NAMED.findall(text))) == 1:
        text = _NAMED.sub("", text)
    text = " ".join(text.strip().rstrip(".").split())
    with_units = _PLAIN_UNITS.fullmatch(text)
    return with_units[1] if with_units and not set(re.findall(r"[A-Za-z]+", with_units[2])) & _NAMES.keys() else text


def _key(text: str) -> str:
    """A key that is equal for texts that differ in spaces, braces around one character, or the case of words."""
    text = re.sub(r"\s+(?!\w)|(?<!\w)\s+", "", re.sub(r"([_^])\{(\w)\}", r"\1\2", text))
    return text.lower() if re.fullmatch(r"[A-Za-z ]{3,}", text) else text


def _parts(text: str) -> tuple[str, list[str]]:
    """The kind of an answer, which includes its brackets or relations, and its parts."""
    text = text.strip()
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[1]) if row.strip()]
        return f"matrix with rows of {list(map(len, rows))}", [cell for row in rows for cell in row]
    if len(sets := re.split(r"\\cup(?![a-z])|∪", text)) > 1:
        return "union", sets
    inner = re.sub(r"^\\(?=\{)", "", text)
    brackets = ""
    if inner[:1] in "([{" and len(_split(inner)) == 1 and _closed_at(inner, 0) == len(inner) - 1:
        brackets = inner[0] + inner[-1]
        inner = inner[1:-1].removesuffix("\\")
    items = _split(inner)
    if brackets and brackets != "{}" and len(items) > 1:
        return brackets, items
    if brackets in ("", "{}"):
        for item in [item for item in items if "\\pm" in item]:
            items.remove(item)
            items += [item.replace("\\pm", "+"), item.replace("\\pm", "-")]
        if len(items) > 1:
            return "list", items
    relations = re.findall(r"[<>]=?|=", text)
    if relations:
        sides = re.split(r"[<>]=?|=", text)
        if relations[0][0] == ">":
            relations = [sign.translate(str.maketrans("<>", "><")) for sign in relations[::-1]]
            sides.reverse()
        return " ".join(relations), sides
    return "expression", [text]


def _split(text: str) -> list[str]:
    """The pieces between the commas that stand in no brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _parse(text: str) -> Any | None:
    """The expression, or None if the text is not one that we can read."""
    source = _to_python(text)
    if source is None:
        return None
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    try:
        parsed = parse_expr(source)
    except Exception:  # the parser raises errors of any class on text that is no expression
        return None
    return parsed if isinstance(parsed, sympy.Expr) else None


def _mixed_number(match: re.Match[str]) -> str:
    r"""2\frac{1}{2} is a half more than 2, but 2\frac{3}{2} is 3."""
    whole, top, bottom = match.groups()
    return f"({whole}+{top}/{bottom})" if int(top) < int(bottom) else f"({whole}*{top}/{bottom})"


def _to_python(text: str) -> str | None:
    """LaTeX or plain arithmetic as Python that has only numbers, operators, known functions and one-letter symbols."""
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"(?<![\d.^_])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", _mixed_number, text)
    text = re.sub(r"(?<![\d.^_/])(\d+)\s+(\d+)/(\d+)(?![\d.])", _mixed_number, text)
    # From the inside out: braces without braces in them.
    for _ in range(text.count("{")):
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\\sqrt\s*\[(\d+)\]\s*\{([^{}]*)\}", r"((\2)^(1/\1))", text)
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
        if name is not None and name not in _NAMES and (len(name) > 3 or (len(name) > 1 and text.isalpha())):
            return None  # a word, not a product of symbols such as 2xy
        starts_factor = sign is None or sign == "("
        if starts_factor and words and words[-1] not in _OPERATORS and words[-1] not in _FUNCTIONS:
            words.append("*")  # 2x, x(y + 1)
        if number is not None:
            words.append(f"Rational('{number.rstrip('.')}')")  # decimals are exact
        else:
            # A letter by itself is a symbol, also where sympy has a constant of that name.
            words.append(sign or _NAMES.get(name) or " * ".join(f"Symbol('{letter}')" for letter in name))
        position = match.end()
    return " ".join(words) or None
