r"""Clean answers of mathematics: plain LaTeX with words set apart, for math-verify to read.

`clean` applies the rules in order; each says what it does by an example, which the tests hold.
Words stand between ⟨ and ⟩ in what comes out: `5\text{ feet}` becomes `5⟨feet⟩`, so that they are
never read as variables.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

Change = str | Callable[[re.Match[str]], str]


class Rule(NamedTuple):
    """A change of texts. `example` is what it makes of a text, written `before -> after`."""

    example: str
    pattern: re.Pattern[str]
    change: Change

    def apply(self, text: str) -> str:
        return self.pattern.sub(self.change, text)


def _rule(example: str, pattern: str, change: Change) -> Rule:
    return Rule(example, re.compile(pattern), change)


_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
    "⁄": "/", "∕": "/", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ",
    "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ",
    "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "→": r"\to ", "…": "...", "π": r"\pi ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
    "φ": r"\phi ", "∠": r"\angle ", "△": r"\triangle ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "′": "'", "’": "'", "º": "°", "≡": r"\equiv ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "√": r"\sqrt ", "％": "%", "\u0305": "",
}  # fmt: skip
_NAMES = (
    "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|lg|exp|lim|max|min|gcd|lcm|det|deg|arg|sqrt|pi|"
    "mod|inf"
)
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
}
_COUNTED = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty"""
_NUMBER_WORDS = {word: number for number, word in enumerate(_COUNTED.split())}
# Short words that are no products of variables.
_SHORT_WORDS = (
    "cm|mm|km|kg|mg|ml|ft|lb|lbs|yd|mi|oz|in|hr|hrs|mph|rpm|am|pm|st|nd|rd|th|no|or|of|is|to|at|by|and|sq|units?|"
    "Hz|kW|kWh|AM|PM|No|NO|Or|OR|YES"
)
_NUMBER = r"\d+(?:\.\d+)?"
_UPRIGHT = ["mathrm", "rm", "operatorname", "mathbf", "mathit", "mathsf", "boldsymbol", "bm"]


def _plain_letter(letter: str) -> str:
    """A letter of Unicode in LaTeX: ½ is a fraction, ² a power, and digits are ASCII's."""
    if letter in _SIGNS:
        return _SIGNS[letter]
    if letter.isascii():
        return letter
    kind = unicodedata.decomposition(letter).split(" ", 1)[0]
    plain = unicodedata.normalize("NFKC", letter).replace("−", "-")
    if kind == "<fraction>":
        top, _, bottom = plain.partition("⁄")
        if not bottom:
            return letter
        return rf"\frac{{{top}}}{{{bottom}}}"
    if kind == "<super>":
        return f"^{{{plain}}}"
    if kind == "<sub>":
        return f"_{{{plain}}}"
    if letter.isdecimal():
        return str(unicodedata.decimal(letter))
    if plain.isspace():
        return " "
    return plain


def _is_function(name: str, command: str) -> bool:
    """Whether a text command has the name of a function; "min" may also be a unit."""
    is_unit = name in ("min", "deg", "mod", "inf", "arg") and not command.startswith("operatorname")
    return bool(re.fullmatch(rf"\\?(?:{_NAMES})", name)) and not is_unit


def _words(match: re.Match[str]) -> str:
    """The content of a text command: digits, and the constants e and i, are no words."""
    command = match[1]
    content = match[2].replace("~", " ").replace("⟨", " ").replace("⟩", " ")
    words = " ".join(content.split())
    is_upright = command in _UPRIGHT
    if not words:
        return " "
    if (is_upright and words in ("e", "i", "d")) or _is_function(words, command):
        return f" {words} "
    if command not in ("mathrm", "rm", "operatorname") and is_upright and len(words) == 1:
        return words
    if re.fullmatch(r"[A-J]", words) and command not in ("mathrm", "rm"):
        return f" {words} "
    if is_upright and re.fullmatch(r"[a-zA-Z]", words) and words not in "mghslLNJWVAKCF":
        return f" {words} "
    if not re.search(r"[A-Za-z]", words) or "\\" in words or "$" in words or "=" in words:
        return f" {words.replace('$', ' ')} "
    pieces = re.split(r"(\([A-Za-z]\)|[()]|(?<![\w^/])[-+]?\d[\d.,/]*)", words)
    result = ""
    for number, piece in enumerate(pieces):
        is_word = number % 2 == 0 and piece.strip(" ,.")
        if is_word:
            result += f"⟨{piece.strip(' ,')}⟩"
        else:
            result += f" {piece} "
    return result


def _bare_word(match: re.Match[str]) -> str:
    """Letters that stand together are a word, unless they may be variables: `AB`, `xy`, `abc`."""
    run = match[0]
    is_word = re.fullmatch(_SHORT_WORDS, run) or (
        len(run) > 2 and not run.isupper() and re.search("[eiou]", run[1:])
    )
    if not is_word:
        return run
    return f"⟨{run}⟩"


def _brace(match: re.Match[str]) -> str:
    if "lbrace" in match[0]:
        return r"\{ "
    return r"\}"


def _one_script(match: re.Match[str]) -> str:
    """Letters of Unicode that stand high, or low, in a row are one power, or one index."""
    return f"{match[0][0]}{{{re.sub(r'[{}^_]', '', match[0])}}}"


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _temperature(match: re.Match[str]) -> str:
    scale = {"C": "celsius", "F": "fahrenheit"}[match[1]]
    return f"⟨degrees {scale}⟩"


def _scaled(match: re.Match[str]) -> str:
    unit = f"⟨{match[3]}⟩" if match[3] else ""
    return rf"{match[1]} \cdot 10^{{{_SCALES[match[2]]}}}{unit}"


def _base(match: re.Match[str]) -> str:
    return f"_{{{_NUMBER_WORDS.get(match[1], match[1])}}}"


def _power_of_ten(match: re.Match[str]) -> str:
    return rf"{match[1]}\cdot 10^{{{int(match[2])}}}"


def _repeats(match: re.Match[str]) -> str:
    before, start, *period = match.groups()
    return _repeating(start, "".join(period), before)


def _repeating(start: str, period: str, before: str) -> str:
    """0.1 with a repeating 6 as a fraction: (16 - 1) / 90."""
    whole = int(before + start + period) - int((before + start) or "0")
    return rf"\frac{{{whole}}}{{{int('9' * len(period) + '0' * len(start))}}}"


def _dots(match: re.Match[str]) -> str:
    """0.333... and 0.1666...: digits that come twice at the end, one digit three times, go on."""
    before = match[1]
    digits = match[2]
    for length in range(1, len(digits) // 2 + 1):
        times = 2
        if length == 1:
            times = 3
        period = digits[-length:]
        if digits.endswith(period * times):
            start = digits[:-length]
            while start.endswith(period):
                start = start[:-length]
            return _repeating(start, period, before)
    return match[0]


def _mixed(match: re.Match[str]) -> str:
    """2 1/2 is five halves, if the fraction is a proper one."""
    sign = match[1] or ""
    whole, top, bottom = map(int, match.group(2, 3, 4))
    if top >= bottom:
        return match[0]
    return rf"{sign}\frac{{{whole * bottom + top}}}{{{bottom}}}"


RULES = [
    # --- what only looks nicer
    _rule(r"\left( x \right) -> ( x )", r"\\(?:m?left|m?right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
    _rule(
        r"\displaystyle x -> x",
        r"\\(?:displaystyle|textstyle|limits|nolimits|boxed|fbox|tag\{[^}]*\})(?![a-zA-Z])",
        "",
    ),
    _rule(r"\dfrac{1}{2} -> \frac{1}{2}", r"\\[dtc]frac", r"\\frac"),
    _rule(r"\dbinom{5}{2} -> \binom{5}{2}", r"\\[dt]binom", r"\\binom"),
    _rule(r"**73** -> 73", r"(?<![\w)}])\*\*|\*\*(?![\w({])|`", ""),
    _rule(r"x**2 -> x^2", r"\*\*", "^"),
    _rule(r"2^{-}^{3} -> 2^{-3}", r"(?:\^\{[^{}]*\}){2,}|(?:_\{[^{}]*\}){2,}", _one_script),
    _rule(r"\(x\) -> x", r"(?<!\\)\\[()\[\]]|(?<!\\)\$+", " "),
    _rule(r"\lbrace 1\rbrace -> \{ 1\}", r"\\(?:lbrace|rbrace)(?![a-zA-Z])", _brace),
    _rule(r"x \le 3 -> x \leq 3", r"\\(?:le|leqslant|leqq)(?![a-zA-Z])|<=|=<", r"\\leq "),
    _rule(r"x \ge 3 -> x \geq 3", r"\\(?:ge|geqslant|geqq)(?![a-zA-Z])|>=", r"\\geq "),
    _rule(r"x \ne 3 -> x \neq 3", r"\\(?:ne|not\s*=)(?![a-zA-Z])|!=", r"\\neq "),
    _rule(r"x \lt 3 -> x < 3", r"\\lt(?![a-zA-Z])", "<"),
    _rule(r"x \gt 3 -> x > 3", r"\\gt(?![a-zA-Z])", ">"),
    _rule(r"x \simeq 3 -> x \approx 3", r"\\(?:simeq|approxeq|sim)(?![a-zA-Z])|~=", r"\\approx "),
    _rule(
        r"\varnothing -> \emptyset", r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"
    ),
    _rule(
        r"\backslash 1 -> \setminus 1", r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus"
    ),
    _rule(r"\bar{z} -> \overline{z}", r"\\bar(?![a-zA-Z])", r"\\overline"),
    _rule(r"\R -> \mathbb{R}", r"\\(?:Reals|R)(?![a-zA-Z])", r"\\mathbb{R}"),
    # --- numbers whose digits stand apart
    _rule(r"12{,}345 -> 12345", r"(?<=\d)(?:\{,\}|,\\!|\\!,|\\,|\\!)(?=\d{3}(?!\d))", ""),
    _rule(r"1'250 -> 1250", r"(?<=\d)'(?=\d{3}(?!\d))", ""),
    _rule(
        r"12 345 -> 12345",
        r"(?<![\d.,^_/}])(\d{1,3})((?:(?: |~|\\ |\\;|\\:|\\thinspace )\d{3})+)(?![\d/])",
        _digits,
    ),
    _rule(
        r"x\, y -> x  y",
        r"(?<!\\)\\[,;:!> ]|~|\\(?:quad|qquad|thinspace|enspace|space)(?![a-zA-Z])",
        " ",
    ),
    # --- degrees, percent, money
    _rule(
        r"90^{\circ} -> 90°",
        r"\^\s*\{?\s*\\circ\s*\}?|\\(?:degree|textdegree|degrees)(?![a-zA-Z])",
        "°",
    ),
    _rule(
        r"\text{°}C -> ⟨degrees celsius⟩",
        r"(?:\\text\{°\}|°)\s*(?:\\(?:text|mathrm)\{)?\s*([CF])\}?(?![a-zA-Z])",
        _temperature,
    ),
    _rule(r"5\% -> 5%", r"\\%|\\text\s*\{\s*\\?%\s*\}", "%"),
    _rule(r"\$5 -> ⟨dollars⟩5", r"\\\$|\\text\{\\?\$\}", "⟨dollars⟩"),
    _rule(r"€5 -> ⟨euros⟩5", r"€|\\euro(?![a-zA-Z])", "⟨euros⟩"),
    _rule(r"£5 -> ⟨pounds sterling⟩5", r"£|\\pounds(?![a-zA-Z])", "⟨pounds sterling⟩"),
    # --- words
    _rule(
        r"5\text{ feet} -> 5⟨feet⟩",
        r"\\(text(?:normal|bf|it|rm|sf|tt|up)?|math(?:rm|bf|it|sf)|mbox|hbox|operatorname\*?|rm|boldsymbol|bm|emph)\s*\{((?:[^{}]|\{[^{}]*\})*)\}",
        _words,
    ),
    _rule(r"{\rm cm} -> ⟨cm⟩", r"\{\\rm\s+([^{}]*)\}", r"⟨\1⟩"),
    _rule(r"2pi -> 2\pi ", rf"(?<![A-Za-z\\⟨])({_NAMES})(?![A-Za-z])(?![^⟨]*⟩)", r"\\\1 "),
    _rule(r"2\sqrt(3) -> 2\sqrt{3}", r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    _rule(r"\sqrt 12 -> \sqrt{1}2", r"\\sqrt\s*([A-Za-z0-9])", r"\\sqrt{\1}"),
    _rule(r"\frac12 -> \frac{1}{2}", r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    _rule(r"\frac1{2} -> \frac{1}{2}", r"\\frac\s*([A-Za-z0-9])\s*\{", r"\\frac{\1}{"),
    _rule(r"\frac{1}2 -> \frac{1}{2}", r"\\frac\s*(\{[^{}]*\})\s*([A-Za-z0-9])", r"\\frac\1{\2}"),
    _rule(
        r"5 feet -> 5 ⟨feet⟩", r"(?<![A-Za-z\\_{⟨])[A-Za-z]{2,}(?![A-Za-z}])(?![^⟨]*⟩)", _bare_word
    ),
    _rule(r"⟨square⟩ ⟨units⟩ -> ⟨square units⟩", r"⟩\s*⟨", " "),
    _rule(r"12_{⟨three⟩} -> 12_{3}", r"_\s*\{?\s*⟨([a-z]+)⟩\s*\}?", _base),
    _rule(r"5⟨cm⟩^2 -> 5⟨cm^2⟩", r"⟩\s*\^\s*\{?([23])\}?", r"^\1⟩"),
    _rule(r"⟨the⟩ 5⟨th⟩ -> 5⟨th⟩", r"^\s*⟨the⟩", ""),
    _rule(r"⟨the answer⟩ -> ⟨answer⟩", r"^\s*⟨the ", "⟨"),
    _rule(r"\approx 3.7 -> 3.7", r"^\s*(?:\\approx|=)(?![a-zA-Z])", ""),
    _rule(
        r"⟨Ann and Bob⟩ -> ⟨Ann⟩⟨and⟩⟨Bob⟩",
        r"(?<=[a-z])[, ] ?(and|or) (?=[^⟨⟩]*⟩)(?![^⟨]*⟨[^⟩]*$)",
        r"⟩⟨\1⟩⟨",
    ),
    _rule(r"7^{⟨th⟩} -> 7⟨th⟩", r"\^\s*\{?\s*⟨(st|nd|rd|th)⟩\s*\}?", r"⟨\1⟩"),
    _rule(r"5 ⟨percent⟩ -> 5%", r"\s*⟨(?:percent|percentage|pct)⟩", "%"),
    _rule(r"5 ⟨degrees⟩ -> 5°", r"\s*⟨degrees?⟩", "°"),
    _rule(r"⟨minus⟩ 5 -> -5", r"⟨(?:minus|negative)⟩\s*", "-"),
    _rule(
        r"⟨about⟩ 5 -> 5",
        r"⟨(?:about|approximately|approx|roughly|exactly|simply|equals?|is)⟩\.?\s*(?=[\d\\-])",
        "",
    ),
    _rule(
        r"3 ⟨million⟩ -> 3 \cdot 10^{6}",
        r"(\d)\s*⟨(hundred|thousand|million|billion|trillion)(?: ([^⟩]*))?⟩",
        _scaled,
    ),
    _rule(
        r"7 (⟨since⟩ x>0) -> 7 ",
        r"[,;]?\s*\(\s*⟨(?:since|because|as|where|for|i\.?e|that "
        r"is)(?![a-z])[^()]*(?:\([^()]*\)[^()]*)*\)\s*$",
        " ",
    ),
    _rule(r"7 ⟨because⟩ x>0 -> 7", r"[,;]?\s*⟨(?:since|because)(?![a-z]).*$", ""),
    _rule(r"⟨E⟩ ) ⟨score⟩ -> (E) ⟨score⟩", r"^\s*⟨([A-J])⟩\s*[).:]\s*", r"(\1) "),
    _rule(r"E - ⟨score⟩ -> (E) ⟨score⟩", r"^\s*⟨?([A-J])⟩?\s+-\s+(?=(?:[aA] )?⟨)", r"(\1) "),
    # --- numbers
    _rule(r"1,250 -> 1250", r"(?<![\d.,({\[])(\d{1,3}(?:,\d{3})+)(?!\d|,\d)", _digits),
    _rule(r"1,00,000 -> 100000", r"(?<![\d.,({\[])(\d{1,2}(?:,\d\d)+,\d{3})(?![\d,])", _digits),
    _rule(
        r"0.\overline{3} -> \frac{3}{9}",
        r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|dot|overset\{\.\})\{(\d+)\}(?![\d\\])",
        _repeats,
    ),
    _rule(
        r"0.\dot{1}4\dot{7} -> \frac{147}{999}",
        r"(?<![\d.])(\d*)\.(\d*)\\dot\{(\d)\}(\d*)\\dot\{(\d)\}",
        _repeats,
    ),
    _rule(r"0.\dot3 -> \frac{3}{9}", r"(?<![\d.])(\d*)\.(\d*)\\dot\s*(\d)(?![\d\\])", _repeats),
    _rule(r"0.(3) -> \frac{3}{9}", r"(?<![\d.])(\d*)\.(\d*)\((\d+)\)(?![\d\\])", _repeats),
    _rule(r"0.333... -> \frac{3}{9}", r"(?<![\d.])(\d*)\.(\d+)\s*(?:\.\.\.+|\\[lc]?dots)", _dots),
    _rule(
        r"1, ..., n -> 1, \ldots , n", r"\.\.\.+|\\(?:dots[cbmio]?|cdots)(?![a-zA-Z])", r"\\ldots "
    ),
    _rule(
        r"1.5e3 -> 1.5\cdot 10^{3}",
        rf"(?<![\w.\\}}])({_NUMBER})[eE]([-+]?\d+)(?![\w.])",
        _power_of_ten,
    ),
    _rule(r"2 x 10^5 -> 2\cdot 10^5", r"(?<=\d)\s*(?:x|X|\*)\s*(?=10\s*\^)", r"\\cdot "),
    _rule(r"2 1/2 -> \frac{5}{2}", r"(?<![\w.}^/])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", _mixed),
    _rule(
        r"2\frac{1}{2} -> \frac{5}{2}",
        r"(?<![\w.}^/)])(-?)(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}",
        _mixed,
    ),
    _rule(r"2^10 -> 2^{10}", rf"\^\s*(-?{_NUMBER})", r"^{\1}"),
    _rule(r"x^(n) -> x^{n}", r"\^\s*\(([^()]*)\)", r"^{\1}"),
    _rule(r"x_12 -> x_{12}", r"_\s*(\d+)", r"_{\1}"),
    _rule(r".5 -> 0.5", r"(?<![\d.\\])\.(?=\d)", "0."),
]


def clean(text: str) -> str:
    """The text by the rules, without spaces, stops and empty groups at its ends."""
    text = "".join(map(_plain_letter, text))
    for rule in RULES:
        text = rule.apply(text)
    text = re.sub(r"⟨\s*[,.;:]*\s*⟩", " ", " ".join(text.split()))
    text = re.sub(r"(?<!\\ldots )(?<!\\ldots)[\s.,;:]+$|(?<=⟩)[!?]+$", "", text).strip()
    return str(_NUMBER_WORDS.get(text.strip("⟨⟩").lower(), text))
