"""Checks of constraints on how a text is written (IFEval: Zhou et al., arXiv 2311.07911).

Each check takes a text without spaces at its ends, and says whether it follows the constraint.
Where the programs of IFEval and of RLVR-IFeval count differently for the same instruction (letters
in either case, forbidden words as whole words, words as runs of letters and digits), IFEval's way
holds. Every pattern takes time linear in the text.
"""

import json
import operator
import re
from collections.abc import Callable, Sequence

IFEVAL_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

# IFEval's prompts show ***, those of RLVR-IFeval * * *.
_DIVIDER = re.compile(r"\* ?\* ?\*")
_DIVIDER_LINE = re.compile(r"^[ \t]*(?:\* \* \*|- - -)[ \t]*$", flags=re.MULTILINE)
_BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-(?!-))", flags=re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_WORD = re.compile(r"\w+")
_JOINED_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+")
_ABBREVIATION = re.compile(r"(?<!\w)(?:Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|[A-Z])\.$")


def _is_around(number: int, count: int) -> bool:
    """Within a tenth of it, and always within 1."""
    return abs(number - count) <= max(round(count / 10), 1)


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "less than": operator.lt,
    "around": _is_around,
    "exactly": operator.eq,
}


def _holds(number: int, relation: str, count: int) -> bool:
    """Whether `number` is at least, or at most, ... `count`."""
    return RELATIONS[relation](number, count)


def _count_phrases(text: str, phrase: str) -> int:
    """How often `phrase` stands in `text` as whole words, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, flags=re.IGNORECASE))


def _strip_pieces(pieces: Sequence[str]) -> list[str]:
    """`pieces` without spaces at their ends, and without a first and a last one that are empty."""
    stripped_pieces = [piece.strip() for piece in pieces]
    first = 0 if stripped_pieces[0] else 1
    stop = len(stripped_pieces) if stripped_pieces[-1] else len(stripped_pieces) - 1
    return stripped_pieces[first:stop]


def count_sentences(text: str) -> int:
    """The number of sentences, which end with . ! or ? before a space or the end.

    "Dr. Smith" and "J. R. R. Tolkien" are not two.

    Example: `count_sentences("Dr. No left. Why? Who knows") == 3`.
    """
    pieces = [piece for piece in _SENTENCE_END.split(text) if _WORD.search(piece)]
    if not pieces:
        return 0
    num_sentences = 1
    for piece in pieces[:-1]:
        if not _ABBREVIATION.search(piece[-20:]):
            num_sentences += 1
    return num_sentences


# --- keywords ---


def has_keywords(text: str, *, words: Sequence[str]) -> bool:
    """All `words`, in any case, also inside longer words."""
    return all(word.lower() in text.lower() for word in words)


def keyword_frequency(
    text: str,
    *,
    word: str,
    count: int,
    relation: str,
) -> bool:
    """As IFEval counts: in any case, and inside longer words too, so that plurals count."""
    num_words = text.lower().count(word.lower())
    return _holds(num_words, relation, count)


def word_frequency(text: str, *, word: str, count: int) -> bool:
    """As RLVR-IFeval counts: exactly `count` whole words, in any case."""
    return _count_phrases(text, word) == count


def avoids_words(text: str, *, words: Sequence[str]) -> bool:
    return not any(_count_phrases(text, word) for word in words)


def letter_frequency(
    text: str,
    *,
    letter: str,
    count: int,
    relation: str = "exactly",
) -> bool:
    num_letters = text.lower().count(letter.lower())
    return _holds(num_letters, relation, count)


# --- language and case ---


def is_in_language(text: str, *, language: str) -> bool:
    """`language` is a code such as "en", for which langdetect must be installed.

    A text of no language is in none.
    """
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it samples
    try:
        detected_language, _, _ = str(langdetect.detect(text)).partition("-")
        wanted_language, _, _ = language.partition("-")
        return detected_language == wanted_language
    except langdetect.LangDetectException:
        return False


is_uppercase = str.isupper
is_lowercase = str.islower


def capital_word_frequency(text: str, *, count: int, relation: str) -> bool:
    """Words without a small letter; what a hyphen or an apostrophe joins is one word."""
    words = _JOINED_WORD.findall(text)
    num_capital = sum(word.isupper() for word in words)
    return _holds(num_capital, relation, count)


# --- length ---


def number_of_words(text: str, *, count: int, relation: str) -> bool:
    num_words = len(_WORD.findall(text))
    return _holds(num_words, relation, count)


def number_of_sentences(text: str, *, count: int, relation: str) -> bool:
    num_sentences = count_sentences(text)
    return _holds(num_sentences, relation, count)


def number_of_paragraphs(text: str, *, count: int) -> bool:
    """Exactly `count` paragraphs between dividers, *** or * * *, which may be at the ends, too."""
    paragraphs = _strip_pieces(_DIVIDER.split(text))
    return len(paragraphs) == count and all(paragraphs)


def nth_paragraph_first_word(
    text: str,
    *,
    count: int,
    paragraph: int,
    word: str,
) -> bool:
    """Exactly `count` paragraphs between blank lines, of which number `paragraph` has `word` first.

    They are counted from 1.
    """
    pieces = re.split(r"\n\s*\n", text)
    paragraphs = [piece.strip() for piece in pieces if piece.strip()]
    if len(paragraphs) != count or paragraph > count:
        return False
    pattern = rf"\W*?{re.escape(word)}(?!\w)"
    return re.match(pattern, paragraphs[paragraph - 1], flags=re.IGNORECASE) is not None


# --- content and form ---


def number_of_placeholders(text: str, *, count: int) -> bool:
    """At least `count`, such as [address]."""
    placeholders = re.findall(r"\[[^\[\]\n]+\]", text)
    return len(placeholders) >= count


def has_postscript(text: str, *, marker: str) -> bool:
    """`marker` in any case, with or without spaces after its full stops, and text behind it."""
    pattern = re.escape(marker).replace(r"\.", r"\.\s?")
    match = re.search(rf"(?<![\w.]){pattern}", text, flags=re.IGNORECASE)
    return match is not None and _WORD.search(text, match.end()) is not None


def number_of_bullets(text: str, *, count: int) -> bool:
    """Exactly `count` lines that begin with one * or one -, not with bold text or a divider."""
    bullets = _BULLET.findall(_DIVIDER_LINE.sub("", text))
    return len(bullets) == count


def has_choice(text: str, *, options: Sequence[str] = IFEVAL_OPTIONS) -> bool:
    """One of `options` stands in the text, in any case."""
    return any(_count_phrases(text, option) for option in options)


def number_of_highlights(text: str, *, count: int) -> bool:
    """At least `count` stretches *like this* or **like this**, each within a line."""
    texts = [double or single for double, single in _HIGHLIGHT.findall(text)]
    return sum(bool(each.strip()) for each in texts) >= count


def number_of_sections(text: str, *, marker: str, count: int) -> bool:
    """At least `count` headings of `marker` and a number, such as "Section 2"."""
    headings = re.findall(rf"{re.escape(marker)}\s?\d", text)
    return len(headings) >= count


def is_json(text: str) -> bool:
    """JSON and nothing else, but for one fence of three backticks around it."""
    try:
        json.loads(re.sub(r"\A```(?:json)?|```\Z", "", text, flags=re.IGNORECASE))
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """Somewhere <<a title>>."""
    titles = re.findall(r"<<([^<>\n]+)>>", text)
    return any(title.strip() for title in titles)


def has_two_responses(text: str) -> bool:
    """Two different ones with ****** between them, which may stand at the ends, too."""
    responses = _strip_pieces(text.split("******"))
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def repeats_prompt(text: str, *, prompt: str) -> bool:
    return text.lower().startswith(prompt.strip().lower())


def ends_with(text: str, *, phrase: str) -> bool:
    """In any case; a closing quotation mark may follow."""
    end = phrase.strip().lower()
    lowered_text = text.lower()
    return lowered_text.endswith(end) or lowered_text.rstrip('" ').endswith(end)


def is_quoted(text: str) -> bool:
    if len(text) < 2:
        return False
    return text.startswith('"') and text.endswith('"')


def has_no_comma(text: str) -> bool:
    return "," not in text
