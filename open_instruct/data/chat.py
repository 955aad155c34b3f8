"""Conversations into tokens, with the assistant's turns marked.

For each reply a conversation is rendered twice: up to the reply with the generation prompt, as a model is asked for
it, and with the reply. The first text must begin the second; the rest is the reply. The two parts are tokenised
apart and laid end to end. So the boundary is exact, chosen and rejected share the same prompt tokens, and an
engine is given these very tokens. Tokenising the whole at once could merge the
end of the prompt and the start of a reply into one token, another one for every reply.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.data.chat_templates import built_in_templates, required_tokens, template_text
from open_instruct.data.files.foreign_json import check_files, one_line, read_object
from open_instruct.data.files.names import near_files
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.messages import REASONING, Message
from open_instruct.errors import InputError
from open_instruct.records import Document, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Some templates write today's date; a run must not depend on the day it is started.
_TEMPLATE_DATE = "26 Jul 2024"

MAX_TOKENS = 2**24
# A template that comes with a model runs in Jinja's sandbox, where it could still loop or write without end.
RENDER_TIMEOUT_S = 30.0
MAX_RENDERED = 2**24  # characters beside those of the conversation
_LONGEST_OPENING = 32  # characters of a reply that a generation prompt may already hold


def load_tokenizer(
    name_or_path: str, *, flag: str = "--tokenizer_name_or_path", revision: str | None = None
) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a folder or of a hub name, in a revision; code that comes with it is never run.

    Raises:
        InputError: no such folder, or it is asked for a revision; the tokenizer's files are missing or damaged; it has
            no fast (tokenizer.json) form; or it adds characters of its own to the start of a text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(name_or_path).expanduser()
    if path.exists():
        if revision not in (None, "main"):
            raise InputError(f"--model_revision {revision}: {path} is a folder, which has none; leave the flag out")
        check_tokenizer_folder(path, flag=flag)
        _check_token_ids(path / "tokenizer.json")
        name_or_path = str(path)
    elif name_or_path.startswith((".", "/", "~")) or len(path.parts) > 2:
        raise InputError(f"{flag}: {name_or_path}: no such folder.{near_files(path)}")
    try:
        with _panics_as_errors(f"{flag}: the tokenizer of {name_or_path}"):
            if path.is_dir() and not (path / "tokenizer_config.json").is_file():
                tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
            else:
                tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
            if not tokenizer.is_fast:
                raise InputError(f"{flag}: {name_or_path} has only a slow tokenizer; a tokenizer.json is needed.")
            a, b = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in ("a", "b"))
            text = tokenizer.backend_tokenizer.decode(a + b)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds of errors: its own, its parsers' and those of downloads
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
    if text != "ab":
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} does not keep a text as it is ('a' and 'b' end to end read "
            f"{text!r}), so a prompt and its reply cannot be joined; use a byte-level tokenizer without a prefix space."
        )
    return tokenizer


def check_tokenizer_folder(path: Path, *, flag: str) -> None:
    """:raises InputError: the folder has no tokenizer that can be read."""
    if path.is_file():
        raise InputError(f"{flag}: {path} is a file; give the folder that has the tokenizer's files.")
    if not (path / "tokenizer.json").is_file():
        raise InputError(
            f"{flag}: {path} has no tokenizer.json (nor is a slow tokenizer enough); copy it, with "
            "tokenizer_config.json, from the checkpoint that the model was trained from."
        )
    check_files(path)


@contextmanager
def _panics_as_errors(name: str) -> Iterator[None]:
    """:raises InputError: the tokenizer library, written in Rust, panics; Python's PanicException is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{name} fails on a text ({one_line(error)}): mend its tokenizer.json, or use that of the model's origin"
        ) from None


def _check_token_ids(file: Path) -> None:
    """Refuse ids out of range: the library allocates a place for every id up to the largest."""
    fields = read_object(file)
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = fields.get("added_tokens")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS:
            raise InputError(f"{file}: {token_id!r} is no token id; they are whole numbers from 0 to {MAX_TOKENS - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template, with its name for messages."""

    name: str
    text: str


def choose_chat_template(
    tokenizer: PreTrainedTokenizerFast, name: str | None, *, add_bos: bool = False
) -> ChatTemplate:
    """The template `name`, built in or a file, or the tokenizer's own where it is None; with `add_bos`, behind a bos
    token.

    Raises:
        InputError: no such name or file; no name and no template of its own; the tokenizer lacks a token that the
            template needs; or the template cannot be parsed.
    """
    if name is not None:
        template = ChatTemplate(name=name, text=template_text(name))
        _check_tokens(tokenizer, template)
    else:
        names = ", ".join(built_in_templates())
        own = tokenizer.chat_template
        own = own.get("default") if isinstance(own, dict) else own
        if not own:
            raise InputError(f"the tokenizer has no chat template: choose one by --chat_template_name ({names}).")
        if not isinstance(own, str):
            raise InputError(
                f"the tokenizer's own chat template is a {type(own).__name__}, not text: mend tokenizer_config.json, "
                f"or choose one by --chat_template_name ({names})."
            )
        template = ChatTemplate(name="the tokenizer's own", text=own)
    _check_syntax(tokenizer, template)
    return _behind_bos(tokenizer, template) if add_bos else template


def _behind_bos(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> ChatTemplate:
    if tokenizer.bos_token is None:
        raise InputError("--add_bos: the tokenizer has no bos token; leave the flag out.")
    if re.match(r"\s*\{\{-?\s*bos_token", template.text) or template.text.startswith(tokenizer.bos_token):
        raise InputError(
            f"--add_bos: {template.name} chat template begins with the bos token itself; leave the flag out."
        )
    return ChatTemplate(name=f"{template.name}, behind a bos token", text="{{ bos_token }}" + template.text)


def _check_tokens(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
    named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    missing = [key for key, token in named.items() if key in template.text and token is None]
    required = required_tokens(template.text)
    vocabulary = tokenizer.get_vocab() if required else {}
    missing += [token for token in required if token not in vocabulary]
    if missing:
        raise InputError(
            f"--chat_template_name {template.name} needs {', '.join(missing)}, which the tokenizer does not have; "
            "use the template that the model was trained with, or 'simple_chat' or 'tulu', which need only an eos."
        )


def _check_syntax(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        with _ends_in_time(template):
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}], chat_template=template.text, tokenize=False
            )
    except TemplateSyntaxError as error:
        raise InputError(f"{template.name} chat template, line {error.lineno}: {error.message}") from error
    except InputError:
        raise
    except Exception:
        pass  # the template may refuse these turns in any way; an error in real rows is reported with the row


@contextmanager
def _ends_in_time(template: ChatTemplate) -> Iterator[None]:
    """Interrupt a template that does not end; this works in the main thread alone, the only one that Python interrupts.

    Raises:
        InputError: the template runs longer than `RENDER_TIMEOUT_S`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise InputError(
            f"{template.name} chat template does not end: it ran for {RENDER_TIMEOUT_S:g} s on one conversation; "
            f"choose one by --chat_template_name ({', '.join(built_in_templates())})"
        )

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, RENDER_TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class ChatFormat:
    """A tokenizer with a chat template: conversations to text, text to tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._end_tokens = tuple(sorted(token for token in added if token.strip()))

    @property
    def fingerprint(self) -> str:
        """Hash of everything that token ids depend on: the tokenizer's content and the template's text."""
        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        content["truncation"] = content["padding"] = None  # settings of the last call, no content
        special = {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()}
        text = json.dumps([content, special, self.template.text], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def reads_reasoning(self) -> bool:
        """Whether the template writes a message's `reasoning_content`."""
        return REASONING in self.template.text

    def render(self, prompt: Sequence[Message], replies: Sequence[Message]) -> tuple[str, tuple[str, ...]]:
        """The text of the prompt, and the text of each reply behind it, up to the end-of-turn token.

        Raises:
            MalformedRow: the template refuses the conversation, does not begin the whole with the prompt, or
                does not write all of a reply.
        """
        prompt_text = self._apply(prompt, add_generation_prompt=True)
        if not prompt_text:
            raise self._refusal("writes nothing before the reply")
        return prompt_text, tuple(self._render_reply(prompt, prompt_text, reply) for reply in replies)

    def render_turns(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """The text of a conversation, cut so that every second piece is an assistant's turn as a model generates it.

        Example: two turns of the user and of the assistant each give prompt, reply, prompt, reply; the second prompt
        starts with what the template writes between a reply and the user's next turn.

        Raises:
            MalformedRow: see `render`; or the template writes an earlier turn in another way once there is a later one.
        """
        pieces: list[str] = []
        done = ""
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt_text, (reply_text,) = self.render(messages[:turn], [message])
            if not prompt_text.startswith(done):
                pieces[-1] = self._as_earlier(pieces[-1], prompt_text[len(done) - len(pieces[-1]) :])
                done = "".join(pieces)
            if not prompt_text.startswith(done):
                raise self._refusal(
                    f"writes an earlier reply differently before turn {turn + 1}: "
                    f"{_where_they_part(done, prompt_text)}, so no single text teaches every turn; choose another by "
                    "--chat_template_name, or make a row of each reply",
                )
            pieces += [prompt_text[len(done) :], reply_text]
            done = prompt_text + reply_text
        return tuple(pieces)

    def _as_earlier(self, reply_text: str, written: str) -> str:
        """The reply with the end token that it has in `written`; OLMo's template ends earlier turns otherwise."""
        own_end = next((end for end in self._end_tokens if reply_text.endswith(end)), "")
        body = reply_text.removesuffix(own_end)
        end = next((end for end in self._end_tokens if written.startswith(body + end)), "")
        return body + end if end else reply_text

    def _render_reply(self, prompt: Sequence[Message], prompt_text: str, message: Message) -> str:
        whole = self._apply([*prompt, message], add_generation_prompt=False)
        if not whole.startswith(prompt_text):
            raise self._refusal(
                f"does not write what it asks for the reply with: "
                f"{_where_they_part(prompt_text, whole)}, so where the reply starts is not known; "
                "choose another by --chat_template_name",
            )
        reply, reply_text = message["content"], whole[len(prompt_text) :]
        # The generation prompt may hold the first words of the reply, such as <think>.
        starts = (n for n in range(min(len(reply), _LONGEST_OPENING)) if prompt_text.endswith(reply[:n]))
        if not any(squeezed(reply[n:]) in squeezed(reply_text) for n in starts):
            raise self._refusal(f"leaves out part of the reply {_shorten(reply)}")
        if self.reads_reasoning and squeezed(message.get(REASONING, "")) not in squeezed(reply_text):
            raise self._refusal(f"leaves out part of the {REASONING} of the reply {_shorten(reply)}")
        # A model never generates what follows the end of the turn (ChatML's newline), so it is not learned.
        trimmed = reply_text.rstrip()
        return trimmed if self.ends_turn(trimmed) else reply_text

    def _apply(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        turns: list[Any] = list(messages)
        try:
            with _ends_in_time(self.template):
                text = self.tokenizer.apply_chat_template(
                    turns,
                    chat_template=self.template.text,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    date_string=_TEMPLATE_DATE,
                )
        except InputError:
            raise
        except Exception as error:  # foreign code, which may raise anything
            raise self._refusal(f"refuses the conversation: {one_line(error)}") from error
        assert isinstance(text, str)
        if len(text) > MAX_RENDERED + 2 * len(str(messages)):
            raise self._refusal(f"writes {len(text):,} characters")
        return text

    def _refusal(self, what_it_does: str) -> MalformedRow:
        return MalformedRow("template", f"{self.template.name} chat template {what_it_does}")

    def ends_turn(self, reply_text: str) -> bool:
        """Whether a rendered reply ends in one of the tokenizer's special tokens."""
        return reply_text.endswith(self._end_tokens) if self._end_tokens else False

    def turn_end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a generated reply, ascending: the end of text, and the template's end of a turn.

        Example: ChatML ends a turn with `<|im_end|>`; the tokenizer's own end may be `<|endoftext|>`: both are in.
        """
        ends = {self.tokenizer.eos_token_id} if isinstance(self.tokenizer.eos_token_id, int) else set()
        turns: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        text = self._apply(turns, add_generation_prompt=False).rstrip()
        if self.ends_turn(text):
            ends.add(self.tokenize([text])[0][-1])
        return tuple(sorted(ends))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with nothing added: templates write their own special tokens."""
        with _panics_as_errors(f"the tokenizer of {self.tokenizer.name_or_path}"):
            return self.tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False
            )["input_ids"]

    def check_reply(self, reply_text: str, token_ids: Sequence[int]) -> None:
        """Check that the tokens of a rendered reply decode to its text.

        Raises:
            MalformedRow: they do not, or there are none.
        """
        text = self.tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False)
        if not token_ids or squeezed(reply_text) not in squeezed(text):
            raise MalformedRow("tokenizer", f"the tokenizer cannot write the reply {_shorten(reply_text)}")

    def encode(self, messages: Sequence[Message]) -> Document:
        """The document of one conversation that ends with an assistant's turn.

        Raises:
            MalformedRow: see `render` and `check_reply`.
        """
        prompt_text, (reply_text,) = self.render(messages[:-1], messages[-1:])
        prompt_ids, reply_ids = self.tokenize([prompt_text, reply_text])
        self.check_reply(reply_text, reply_ids)
        span = Span(start=len(prompt_ids), stop=len(prompt_ids) + len(reply_ids))
        return Document(token_ids=(*prompt_ids, *reply_ids), responses=(span,))


def single_token_id(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    """The id of a word that is one token.

    Raises:
        InputError: the word is several tokens.
    """
    ids: list[int] = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise InputError(
            f"{word!r} has to be one token, and this tokenizer makes {len(ids)} of it: choose a word that it has"
        )
    return ids[0]


def squeezed(text: str) -> str:
    """Text in Unicode form NFKC without white space; templates and tokenizers must leave this unchanged."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _where_they_part(one: str, other: str) -> str:
    """`'...this' becomes '...that'`, from shortly before the first place where two texts differ."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, at - 20)
    return f"{one[start:][:60]!r} becomes {other[start:][:60]!r}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
