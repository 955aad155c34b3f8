"""Rows in files, and the data sets of tokens that come of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from open_instruct.batching.steps import BatchShape
from open_instruct.commands.tiny_model import train_tokenizer
from open_instruct.core.records import Document, Span
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import Message
from open_instruct.data.mixer import parse_mixer_list


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes are tokens, so that lengths can be counted by hand."""
    return train_tokenizer([""], vocab_size=262)


def chat_format(tokenizer: PreTrainedTokenizerFast, template: str | None) -> ChatFormat:
    return ChatFormat.choose(tokenizer, template)


def encoded(chat: ChatFormat, messages: Sequence[Message]) -> Document:
    """The document of a conversation that ends with an assistant's turn."""
    prompt_text, (reply_text,) = chat.render(messages[:-1], messages[-1:])
    prompt_ids, reply_ids = chat.tokenize([prompt_text, reply_text])
    chat.check_reply(reply_text, reply_ids)
    span = Span(start=len(prompt_ids), stop=len(prompt_ids) + len(reply_ids))
    return Document(token_ids=(*prompt_ids, *reply_ids), responses=(span,))


def marked(tokenizer: PreTrainedTokenizerFast, document: Document) -> str:
    """The text of a document; what is learned stands in brackets."""
    text, stop = "", 0
    for span in document.responses:
        context, learned = (
            document.token_ids[stop : span.start],
            document.token_ids[span.start : span.stop],
        )
        text += f"{tokenizer.decode(list(context))}[{tokenizer.decode(list(learned))}]"
        stop = span.stop
    return text + str(tokenizer.decode(list(document.token_ids[stop:])))


def write_rows(path: Path, *rows: Any) -> Path:
    """A file with a row a line; bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def load_rows(
    load: Callable[..., Any],
    *mixer_list: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    **changes: Any,
) -> Any:
    """What `load_token_dataset` or `load_prompt_dataset` makes of a mixture."""
    listed = {name: changes.pop(name) for name in ("splits", "flag") if name in changes}
    entries = parse_mixer_list(list(map(str, mixer_list)), **listed)
    chat = chat_format(tokenizer, template)
    return load(entries=entries, chat=chat, **({"on_bad_row": "error", "seed": 0} | changes))


def turns(*contents: str, roles: str = "") -> list[Any]:
    """Messages of the user and the assistant in turn, or of `roles`, such as "sua"."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    letters = roles or ("ua" * len(contents))[: len(contents)]
    return [
        {"role": names[letter], "content": text}
        for letter, text in zip(letters, contents, strict=True)
    ]


def pair(question: str, chosen: str, rejected: str) -> dict[str, Any]:
    """A preference row of one turn."""
    return {"chosen": turns(question, chosen), "rejected": turns(question, rejected)}


def shape_of(**changes: Any) -> BatchShape:
    least = {
        "documents_per_sample": 1,
        "max_samples_per_microbatch": 1,
        "max_microbatches": 1,
        "max_seq_length": 8,
    }
    return BatchShape(**(least | {"packing": True} | changes))
