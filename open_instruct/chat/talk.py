"""A conversation: questions in, the pieces of replies out as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.messages import Message
from open_instruct.errors import InputError
from open_instruct.parallel import peers
from open_instruct.wording import escaped

if TYPE_CHECKING:
    from open_instruct.chat.on_transformers import TransformersSpeaker

QUESTION = "you> "
REPLY = "model> "


def answer_one(question: str, speaker: TransformersSpeaker, chat: ChatFormat, *, system_prompt: str | None) -> None:
    """Write the answer to stdout, and a line's end."""
    _reply([*_opening(system_prompt), {"role": "user", "content": question}], speaker, chat)


def converse(speaker: TransformersSpeaker, chat: ChatFormat, *, system_prompt: str | None) -> None:
    """Ask for questions until Ctrl-D or Ctrl-C; one that does not fit behind the others begins anew."""
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and keys to move by
    opening = _opening(system_prompt)
    messages = list(opening)
    while True:
        try:
            question = input(QUESTION).strip()
        except (EOFError, KeyboardInterrupt):
            peers.stop = None
            print()
            return
        if not question:
            continue
        asked: Message = {"role": "user", "content": question}
        try:
            reply = _reply([*messages, asked], speaker, chat, said_before=REPLY)
        except InputError as error:
            anew = "; beginning anew" if len(messages) > len(opening) else ""
            print(escaped(f"{error}{anew}", "\n\t"))
            messages = list(opening)
            continue
        messages += [asked, {"role": "assistant", "content": reply}]


def _opening(system_prompt: str | None) -> list[Message]:
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]


def _reply(
    messages: Sequence[Message], speaker: TransformersSpeaker, chat: ChatFormat, *, said_before: str = ""
) -> str:
    """Say it, and return it: as far as it came, where Ctrl-C ends it at a terminal.

    Raises:
        InputError: the conversation does not fit, or the template refuses it.
    """
    try:
        prompt, _ = chat.render(messages, ())
    except MalformedRow as error:
        raise InputError(error.reason) from None
    (token_ids,) = chat.tokenize([prompt])
    if len(token_ids) >= speaker.max_tokens:
        raise InputError(f"the conversation has {len(token_ids)} tokens, and the model takes {speaker.max_tokens}")
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        print(escaped(piece, "\n\t") if sys.stdout.isatty() else piece, end="", flush=True)

    print(said_before, end="", flush=True)
    try:
        speaker.say(token_ids, write)
    except KeyboardInterrupt:
        if not said_before:
            raise
        peers.stop = None  # it was the reply that was to end
    print(flush=True)
    return "".join(pieces)
