r"""Find where a completion says its answer.

| what the completion has, in this order | the answer |
|---|---|
| `<answer>…</answer>` | is looked for in the last of them; all of it, if nothing below is in it |
| `\boxed{…}` | the last; several in one sentence beside a truth that is a list of as many |
| "answer is …", "Answer: …" | the last, to the end of its sentence (or of the next line if empty) |
| `**…**`, `$…$`, `\(…\)`, `\[…\]` | the last of these on the last line that has one |
| none of them | the last line, if it is nothing but mathematics |

In prose `- 73` may be an entry of a list, and `73!` exclaimed: either reading will do there.
"""

import re

from open_instruct.rewards.words import find_tagged_answer

# Characters at the end of a completion, for formulas that nothing says are the answer.
MAX_SEARCHED = 5_000
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[A-Za-z0-9\\]))")
_STATED = re.compile(
    r"(?:(?:answers?|options?|choice)\**\s*(?:is|are|=)(?![a-z])\s*:?|answers?[\s*_]*:)[\s*_]*(?:(?:therefore|thus|simply|then|just)\s+)?(?=(\S?))",
    re.IGNORECASE,
)
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\*\*([^*\n]+)\*\*", re.DOTALL
)
_END_OF_SENTENCE = re.compile(
    r"\n|(?<=[^\d\s])\.(?=\s|$)|(?<=\d)\.(?=\s+[A-Z\\$(]|\s*$)|[,;]?\s+\(?(?:because|since|as|so|which|hence|thus)\b|;\s+(?=[a-z]{2,})|[!?]\s+(?=[A-Za-z]{2,})",
)
# What begins an entry of a list: a dash, a dot, a number, a letter.
_LIST_MARK = re.compile(r"^(?:[-–—+*•‣◦▪>]|\d{1,2}[.)]|[a-z]\))\s+(?=\S)")
_EXCLAIMED = re.compile(r"(?<=\d)\s*[!?]+$")
_SMILES = re.compile(r"\s*(?:[:;]-?\)|[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff])+\s*$")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z]*\})")
_NO_PROSE = re.compile(r"\\[A-Za-z]+(?:\s*\{[^{}]*\})?|\b(?:sin|cos|tan|log|ln|pi|sqrt|and|or)\b")


def find_answer(completion: str) -> str | None:
    """The text of the answer, or None if there is none (or its brace is never closed).

    Example: `find_answer("So \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"`.
    """
    answers = find_answers(completion)
    if not answers:
        return None
    return answers[-1]


def find_answers(completion: str) -> list[str]:
    """The answer as the last entry, before it those that stand in boxes of the same sentence."""
    return _find_all(completion)[0]


def find_readings(completion: str) -> list[str]:
    """What the answer may say: as it is written, and in prose without marks of the sentence.

    Example: `find_readings("Answer:\n- 73!") == ["- 73!", "73!", "- 73", "73"]`: the dash may begin
    an entry of a list, or be a minus, and the number may be exclaimed, or a factorial.
    """
    answers, is_prose = _find_all(completion)
    if not is_prose:
        return answers[-1:]
    readings = answers[-1:]
    if re.search(rf"^\s*{re.escape(readings[0])}", completion, re.MULTILINE):
        readings += [_LIST_MARK.sub("", each) for each in readings]
    readings += [_EXCLAIMED.sub("", each) for each in readings]
    return list(dict.fromkeys(readings))


def _find_all(completion: str) -> tuple[list[str], bool]:
    """The answers that `find_answers` gives, and whether the last is prose: no box, no formula."""
    answer_text = find_tagged_answer(completion)
    boxes = list(_BOXED.finditer(answer_text))
    if boxes:
        return _read_boxes(answer_text, boxes), False
    stated_answer = _find_stated(answer_text)
    if stated_answer:
        return [stated_answer], True
    marked_answer = _find_marked(answer_text)
    if marked_answer is not None:
        return [marked_answer], False
    last_line = _find_last_line(answer_text)
    if last_line is None and answer_text != completion:
        last_line = answer_text
    if not last_line:
        return [], False
    return [last_line], True


def _read_boxes(text: str, boxes: list[re.Match[str]]) -> list[str]:
    """What is in the boxes that only few words, and no end of a paragraph, stand between."""
    answers: list[str] = []
    end = len(text)
    for box in reversed(boxes):
        content, stop = _read_box(text, box)
        if answers and stop > end:  # a box around the one that is read already
            answers[0] = content
            end = box.start()
            continue
        if answers and _ends_sentence(text[stop:end]):
            return answers
        answers.insert(0, content)
        end = box.start()
    return answers


def _ends_sentence(between: str) -> bool:
    """Whether a text between two boxes is long, or says that the first box is no answer."""
    if "\n\n" in between or len(between) > 60:
        return True
    return re.search(r"\bnot?\b|[.!?]\s|instead|wait", between) is not None


def _read_box(text: str, box: re.Match[str]) -> tuple[str, int]:
    """The content of a box, "" where its brace is never closed, and where the box ends."""
    if not box[1]:
        short = re.match(r"\\[A-Za-z]+|\w", text[box.end() :])
        if short is None:
            return "", box.end()
        return short[0], box.end() + short.end()
    depth = 1
    for place in range(box.end(), len(text)):
        is_escaped = text[place - 1] == "\\"
        if not is_escaped:
            depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[box.end() : place], place + 1
    return "", len(text)


def _find_stated(text: str) -> str | None:
    """What the last "answer is" says."""
    for match in reversed(list(_STATED.finditer(text))):
        rest = text[match.end() :].lstrip(" *_:\n")
        formula = re.match(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]", rest, re.DOTALL)
        if formula:
            return (formula[1] or formula[2]).strip()
        sentence = _take_sentence(rest)
        if sentence:
            return sentence
    return None


def _take_sentence(text: str) -> str:
    """The text up to the end of its first sentence; ends within formulas are none."""
    hidden = _MATH.sub(_hide_formula, text)
    end = _END_OF_SENTENCE.search(hidden)
    if end is not None:
        text = text[: end.start()]
    sentence = _SMILES.sub("", text).strip()
    # Behind a formula, or bold, a mark is of the sentence.
    return re.sub(r"(?<=[*$\])])[!?]+$", "", sentence).strip(" *_").rstrip(".,;")


def _hide_formula(match: re.Match[str]) -> str:
    """As many letters x as a formula has; bold text stays."""
    is_bold = match[5] is not None
    if is_bold:
        return match[0]
    return re.sub(r"[^\n]", "x", match[0])


def _find_marked(text: str) -> str | None:
    """What stands in the last formula, or in bold, of the lines at the end."""
    if len(text) > MAX_SEARCHED:
        text = text[-MAX_SEARCHED:].partition("\n")[2]
    last: str | None = None
    for match in _MATH.finditer(text):
        content = next(filter(None, match.groups())).strip()
        if _is_formula(content):
            last = content
    return last


def _is_formula(text: str) -> bool:
    """Whether a text has letters or digits, and no words of prose."""
    has_content = re.search(r"[A-Za-z0-9]", text) is not None
    return has_content and not _PROSE.search(_NO_PROSE.sub(" ", text))


def _find_last_line(text: str) -> str | None:
    """The last line, if it is nothing but mathematics, or a word."""
    marks = " *_`."
    lines = [line for line in text.splitlines() if line.strip(marks)]
    if not lines:
        return None
    last = _SMILES.sub("", lines[-1]).strip(marks)
    is_alone = len(lines) == 1 and len(last.split()) <= 3
    if is_alone or _is_formula(last):
        return last
    return None
