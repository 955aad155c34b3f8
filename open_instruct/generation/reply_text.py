"""The text of sampled tokens, which verifiers and tools read."""

from collections.abc import Sequence
from typing import Any


def decode_reply(
    tokenizer: Any,
    token_ids: Sequence[int],
    *,
    finish_reason: str,
    stop_reason: int | str | None,
) -> str:
    """The text of a reply, without the token that ends it.

    It has special tokens as they are: `<think>`, `</answer>` and `<tool_call>` are special in some
    tokenizers, and their tags are looked for.

    Args:
        tokenizer: of transformers.
        token_ids: all that were sampled.
        finish_reason: "stop", or "length" of a reply that was cut.
        stop_reason: vLLM's; a text is the stop string that ended the reply.
    """
    if finish_reason == "stop" and not isinstance(stop_reason, str):
        token_ids = token_ids[:-1]
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if isinstance(stop_reason, str):
        # vLLM's own text has some of the prompt in front where that ends within a character.
        before, stop_string, _ = text.partition(stop_reason)
        return before + stop_string  # which may end within a token
    return text
