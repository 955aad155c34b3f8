"""Foreign texts, which environments write, are tokenised as plain text apart from the template's.

A template renders a conversation with a mark in the place of each foreign text; the tokens of the
template's own text and those of the foreign texts are then joined.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from open_instruct.data.templates.text_compare import escape_as_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Letters alone, so that no template trims or escapes a mark.
REPLY_MARK = "qzReplyMarkzq{}zq"
TEXT_MARK = "qzContentMarkzq{}zq"
ANY_TEXT_MARK = re.compile(r"qzContentMarkzq(\d+)zq")
LOOKS_LIKE_A_MARK = ("qzReplyMarkzq", "qzContentMarkzq")
# A longer text has its beginning counted before the whole is tokenised.
USUAL_CHARACTERS_PER_TOKEN = 16
# So many tokens more a beginning may have alone than within the whole, where its last word goes on.
SLACK_TOKENS = 256


def split_at_marks(text: str) -> list[str]:
    """Cut a template's text at its marks: its own text and the numbers of marks in turn."""
    return ANY_TEXT_MARK.split(text)


class PlainTokenizer:
    """Tokenises foreign text: nothing in it becomes a special token, or another added token.

    Another added token is, for example, `</tool_response>`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        added_tokens = tokenizer.added_tokens_decoder.values()
        special = {
            *(str(each) for each in added_tokens if each.special),
            *tokenizer.all_special_tokens,
        }
        others = {str(each) for each in added_tokens} - special
        self._backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.encode_special_tokens = True
        self._others = _find_any(others)
        self.special_tokens = _find_any({*special, *LOOKS_LIKE_A_MARK})
        self.added_tokens = _find_any({*special, *others, *LOOKS_LIKE_A_MARK})

    def encode(self, text: str) -> list[int]:
        """The ids of a foreign text."""
        cuts = [match.start() + 1 for match in self._others.finditer(text)]
        edges = pairwise((0, *cuts, len(text)))
        pieces = [text[start:stop] for start, stop in edges]
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += self._backend.encode(piece, add_special_tokens=False).ids
        return token_ids

    def has_more_tokens(self, texts: Iterable[str], limit: int) -> bool:
        """Whether texts certainly have more tokens than `limit`; the limit alone bounds the cost.

        No token has more characters than the longest of the vocabulary; and if the beginning of the
        texts has too many tokens, so has all of it.
        """
        texts = list(texts)
        num_characters = sum(map(len, texts))
        usual = USUAL_CHARACTERS_PER_TOKEN * (limit + SLACK_TOKENS)
        if num_characters <= usual:
            return False
        if num_characters > max(usual, self._longest_token * limit):
            return True
        return len(self.encode("".join(texts)[:usual])) > limit + SLACK_TOKENS

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, but for added ones, which foreign text cannot be."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=1)


class ForeignTexts:
    """The foreign texts of one rendering, each with its mark."""

    def __init__(self, plain: PlainTokenizer) -> None:
        self.texts: list[str] = []
        self._plain = plain

    def mark(self, text: str) -> str:
        """Add a text; returns the mark that stands for it."""
        self.texts.append(text)
        return TEXT_MARK.format(len(self.texts) - 1)

    def mark_tokens(self, value: Any) -> Any:
        """Put marks in the place of the tokens that the texts of a JSON value spell."""
        if isinstance(value, str):
            return self._mark_matches(value, self._plain.added_tokens)
        if isinstance(value, Mapping):
            return {self.mark_tokens(key): self.mark_tokens(each) for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.mark_tokens(each) for each in value]
        return value

    def mark_message(
        self, message: Mapping[str, Any], row_texts: Sequence[str]
    ) -> Mapping[str, Any]:
        """Put marks in the place of the tokens that a message spells.

        What its content has from the row keeps tokens such as `<think>`, as in prompts without an
        environment; special tokens have marks there too.
        """
        content = message.get("content")
        if not isinstance(content, str):
            return {key: self.mark_tokens(value) for key, value in message.items()}
        beginnings = [text for text in row_texts if content.startswith(text)]
        beginning = max(beginnings, key=len, default="")
        rest = content.removeprefix(beginning)
        others = {
            key: self.mark_tokens(value) for key, value in message.items() if key != "content"
        }
        marked_content = self._mark_matches(
            beginning, self._plain.special_tokens
        ) + self.mark_tokens(rest)
        return {**others, "content": marked_content}

    def mark_turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Put marks in the place of a turn's content, and of the tokens that the rest spells."""
        others = {key: self.mark_tokens(value) for key, value in turn.items() if key != "content"}
        return {**others, "content": self.mark(turn["content"])}

    def find_written(self, whole: str, with_marks: str) -> list[str] | None:
        """The texts as `whole` has them: unchanged, trimmed, or as JSON; None if otherwise.

        A template may write some of them in one way and some in another.
        """
        first, *rest = split_at_marks(with_marks)
        if not whole.startswith(first):
            return None
        # By the place in `whole` up to which it is explained.
        explanations: dict[int, dict[int, str]] = {len(first): {}}
        for number, piece in zip(map(int, rest[::2]), rest[1::2], strict=True):
            longer: dict[int, dict[int, str]] = {}
            for place, written in explanations.items():
                for write in (str, str.strip, escape_as_json):
                    text = written.get(number, write(self.texts[number]))
                    if whole.startswith(text + piece, place):
                        end = place + len(text) + len(piece)
                        longer.setdefault(end, {**written, number: text})
            explanations = longer
        if len(whole) not in explanations:
            return None
        written = explanations[len(whole)]
        return [written.get(number, text) for number, text in enumerate(self.texts)]

    def _mark_matches(self, text: str, pattern: re.Pattern[str]) -> str:
        return pattern.sub(lambda match: self.mark(match[0]), text)


def _find_any(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the tokens, the longest first; white space alone is none."""
    longest_first = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
