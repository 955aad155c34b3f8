"""The tokens at which a generated reply is over."""

from __future__ import annotations

from open_instruct.data.chat import ChatFormat


def turn_end_token_ids(chat: ChatFormat) -> tuple[int, ...]:
    """The end-of-text token, and the token with which the template ends an assistant's turn, ascending.

    Example: ChatML ends a turn with `<|im_end|>`, while the tokenizer's own end may be `<|endoftext|>`: both are in.
    """
    ends: set[int] = set()
    if isinstance(chat.tokenizer.eos_token_id, int):
        ends.add(chat.tokenizer.eos_token_id)
    _, (reply_text,) = chat.render([{"role": "user", "content": "?"}], ["!"])
    if chat.ends_turn(reply_text):
        ends.add(chat.tokenize([reply_text])[0][-1])
    return tuple(sorted(ends))
