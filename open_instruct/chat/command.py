"""`open-instruct chat DIR`: ask a model, in the terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from open_instruct.chat.folder import talking_folder
from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.messages import Message
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.engines.requests import Dtype, SamplingSettings
from open_instruct.errors import InputError
from open_instruct.parallel import peers
from open_instruct.wording import escaped

if TYPE_CHECKING:
    from open_instruct.chat.on_transformers import TransformersSpeaker

PROGRAM = "open-instruct chat"
QUESTION = "you> "
REPLY = "model> "


@dataclass(kw_only=True)
class ChatSection:
    """Replies"""

    system_prompt: str | None = flag("system turn before the first question", None)
    temperature: float = flag("temperature of sampling; 0: the likeliest token", 0.7, minimum=0)
    top_p: float = flag("nucleus sampling", 1.0, above=0, maximum=1)
    max_tokens: int = flag("most tokens of a reply", 1024, minimum=1)
    chat_template_name: str | None = flag("a built-in template, or a Jinja file; default: the model's own", None)
    param_dtype: Dtype | None = flag("dtype of the computation; default: bfloat16 on CUDA, float32 on a CPU", None)


@dataclass(kw_only=True)
class ChatFlags:
    """Talk to the model in the folder DIR, which may be a run's --output_dir or an adapter's folder, or is on the hub.
    Its own chat template is used, which is the one that it was trained with. Where stdin is no terminal, the whole of
    it is one question, and its answer is all that goes to stdout. Ctrl-C ends a reply, and Ctrl-D the conversation.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct chat runs/first",
        "open-instruct chat runs/first/hf_model --temperature 0 --max_tokens 64 < question.txt",
    )

    chat: ChatSection


def main(words: Sequence[str]) -> int:
    """Talk until the questions end; returns the exit code.

    Raises:
        InputError: a flag is wrong, or the folder holds no model that talks.
    """
    if asks_for_help(words):
        print_help(ChatFlags, f"{PROGRAM} DIR")
        return 0
    if not words or words[0].startswith("-"):
        raise InputError(f"the first word is the folder of a model: {PROGRAM} DIR")
    flags = parse(ChatFlags, words[1:]).chat
    refuse(limit_problems(flags))
    folder = talking_folder(words[0])
    is_asked = sys.stdin.isatty()
    question = "" if is_asked else sys.stdin.read().strip()
    if not is_asked and not question:
        raise InputError(
            f"there is no question on stdin: start in a terminal, or echo 'What is 2 + 2?' | {PROGRAM} DIR"
        )

    from open_instruct.chat.on_transformers import TransformersSpeaker

    tokenizer = load_tokenizer(str(folder.model), flag="DIR")
    template = flags.chat_template_name or (str(folder.template) if folder.template else None)
    chat = ChatFormat.choose(tokenizer, template)
    sampling = SamplingSettings(temperature=flags.temperature, top_p=flags.top_p, max_tokens=flags.max_tokens)
    speaker = TransformersSpeaker(folder, chat, sampling=sampling, dtype=flags.param_dtype)
    opening: list[Message] = []
    if flags.system_prompt is not None:
        opening.append({"role": "system", "content": flags.system_prompt})
    if is_asked:
        converse(speaker, chat, opening)
    else:
        answer_one(question, speaker, chat, opening)
    return 0


def answer_one(question: str, speaker: TransformersSpeaker, chat: ChatFormat, opening: Sequence[Message]) -> None:
    """Write the answer to stdout, and a line's end."""
    _reply([*opening, {"role": "user", "content": question}], speaker, chat)


def converse(speaker: TransformersSpeaker, chat: ChatFormat, opening: Sequence[Message]) -> None:
    """Ask for questions until Ctrl-D or Ctrl-C; one that does not fit behind the others begins anew, with `opening`."""
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and keys to move by
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
