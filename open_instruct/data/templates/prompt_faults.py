"""Find what a chat template makes of a prompt that its row does not mean.

Such rows are counted and named in a warning, not refused: some people want just that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from open_instruct.data.conversations.messages import Message
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.templates.chat_templates import QUESTION
from open_instruct.data.templates.text_compare import escape_as_json, squeeze

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ASKING_ROLES = ("system", "user")
_SYSTEM: Message = {"role": "system", "content": "."}


def find_turn_tokens(
    tokenizer: PreTrainedTokenizerFast, render: Callable[[Sequence[Message]], str]
) -> tuple[str, ...]:
    """The tokens that a template writes around turns of the system and of the user.

    Example: `("<|im_end|>", "<|im_start|>")` of ChatML.

    Args:
        tokenizer: which has the tokens.
        render: the template's text of a conversation; it raises MalformedRow where it refuses one.
    """
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    tokens.update(tokenizer.all_special_tokens)
    for turns in ((_SYSTEM, *QUESTION), QUESTION):  # some templates refuse a system turn
        try:
            text = render(turns)
        except MalformedRow:
            continue
        return tuple(sorted(token for token in tokens if token.strip() and token in text))
    return ()


def find_roles_left_out(messages: Sequence[Message], text: str) -> Iterator[str]:
    """The roles of turns that the rendered text does not have, "system" or "user"."""
    for message in messages:
        if message["role"] in ASKING_ROLES and not _is_written(message["content"].strip(), text):
            yield message["role"]


def find_token_in_turns(messages: Sequence[Message], tokens: Sequence[str]) -> str | None:
    """The first of the template's tokens that a turn of the system or of the user spells out.

    It is read as that token: the row may be a text that a template wrote before.
    """
    contents = [message["content"] for message in messages if message["role"] in ASKING_ROLES]
    return next((token for token in tokens for each in contents if token in each), None)


def _is_written(content: str, text: str) -> bool:
    """Whether a text has a turn's content, but for white space, as it is or as in JSON."""
    if content in text:
        return True
    written = squeeze(text)
    return squeeze(content) in written or squeeze(escape_as_json(content)) in written
