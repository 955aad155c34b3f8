"""Conversations into tokens, with the assistant's turns marked.

For each reply a conversation is rendered twice: up to the reply with the generation prompt, as a
model is asked for it, and with the reply. The first text must begin the second; the rest is the
reply. The two parts are tokenised apart and laid end to end. So the boundary is exact, chosen and
rejected share the same prompt tokens, and an engine is given these very tokens. Tokenising the
whole at once could merge the end of the prompt and the start of a reply into one token, another one
for every reply.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from open_instruct.core.errors import InputError
from open_instruct.data.chat_templates import (
    ANSWERED,
    QUESTION,
    TEMPLATE_DAY,
    ChatTemplate,
    choose_another,
    choose_chat_template,
    conversation_form,
    template_variables,
)
from open_instruct.data.conversations.messages import REASONING, Message
from open_instruct.data.conversations.tool_turns import ToolForm
from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.template_trial import refuse_endless

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SYSTEM: Message = {"role": "system", "content": "."}

# A template that comes with a model runs in Jinja's sandbox, where it could still loop, or write
# far too much.
MAX_FORMS_TRIED = 16
MAX_RENDERED = 2**24  # characters beside those of the conversation
_LONGEST_OPENING = 32  # characters of a reply that a generation prompt may already hold


class ChatFormat:
    """A tokenizer with a chat template: conversations to text, text to tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.tool_form = ToolForm.detect(template.text)
        self._forms_tried = set(template.forms_tried)
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
            tokenizer.all_special_tokens
        )
        self._end_tokens = tuple(sorted(token for token in added if token.strip()))
        ids = (tokenizer.backend_tokenizer.token_to_id(token) for token in self._end_tokens)
        self._end_token_ids = dict(zip(self._end_tokens, ids, strict=True))

    @classmethod
    def choose(
        cls, tokenizer: PreTrainedTokenizerFast, name: str | None, *, add_bos: bool = False
    ) -> ChatFormat:
        """The format with the template `name`, or the tokenizer's own where it is None; see
        `choose_chat_template`.
        """
        return cls(tokenizer, choose_chat_template(tokenizer, name, add_bos=add_bos))

    @property
    def fingerprint(self) -> str:
        """Hash of everything that token ids depend on: the tokenizer's content and the template's
        text.
        """
        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        content["truncation"] = content["padding"] = None  # settings of the last call, no content
        special = {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()}
        text = json.dumps([content, special, self.template.text], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def reads_reasoning(self) -> bool:
        """Whether the template writes a message's `reasoning_content`."""
        return REASONING in self.template.text

    def render(
        self, prompt: Sequence[Message], replies: Sequence[Message]
    ) -> tuple[str, tuple[str, ...]]:
        """The text of the prompt, and the text of each reply behind it, up to the end-of-turn
        token.

        Raises:
            MalformedRow: the template refuses the conversation, does not begin the whole with the
                prompt, or does not write all of a reply.
        """
        prompt_text = self.apply(prompt, add_generation_prompt=True)
        if not prompt_text:
            raise self._refusal("writes nothing before the reply")
        self._check_tools(prompt, prompt_text)
        return prompt_text, tuple(
            self._render_reply(prompt, prompt_text, reply) for reply in replies
        )

    def render_turns(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """The text of a conversation, cut so that every second piece is an assistant's turn as a
        model generates it.

        Example: two turns of the user and of the assistant each give prompt, reply, prompt, reply;
        the second prompt starts with what the template writes between a reply and the user's next
        turn.

        Raises:
            MalformedRow: see `render`; or the template writes an earlier turn in another way once
                there is a later one.
        """
        pieces: list[str] = []
        done = ""
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt_text, (reply_text,) = self.render(messages[:turn], [message])
            if not prompt_text.startswith(done):
                pieces[-1] = self._as_earlier(
                    pieces[-1], prompt_text[len(done) - len(pieces[-1]) :]
                )
                done = "".join(pieces)
            if not prompt_text.startswith(done):
                raise self._refusal(
                    f"writes an earlier reply differently before turn {turn + 1}: "
                    f"{_where_they_part(done, prompt_text)}, so no single text teaches every "
                    "turn; choose another by --chat_template_name, or make a row of each reply",
                )
            pieces += [prompt_text[len(done) :], reply_text]
            done = prompt_text + reply_text
        return tuple(pieces)

    def _as_earlier(self, reply_text: str, written: str) -> str:
        """The reply with the end token that it has in `written`;

        OLMo's template ends earlier turns otherwise.
        """
        own_end = next((end for end in self._end_tokens if reply_text.endswith(end)), "")
        body = reply_text.removesuffix(own_end)
        end = next((end for end in self._end_tokens if written.startswith(body + end)), "")
        return body + end if end else reply_text

    def _render_reply(self, prompt: Sequence[Message], prompt_text: str, message: Message) -> str:
        whole = self._apply_answered([*prompt, message])
        if not whole.startswith(prompt_text):
            raise self._refusal(
                f"does not write what it asks for the reply with: "
                f"{_where_they_part(prompt_text, whole)}, so where the reply starts is not known; "
                "choose another by --chat_template_name",
            )
        reply = message["content"]
        reply_text = whole[len(prompt_text) :]
        # The generation prompt may hold the first words of the reply, such as <think>.
        starts = (
            n
            for n in range(min(len(reply), _LONGEST_OPENING) or 1)
            if prompt_text.endswith(reply[:n])
        )
        if not any(squeezed(reply[n:]) in squeezed(reply_text) for n in starts):
            raise self._refusal(f"leaves out part of the reply {_shorten(reply)}")
        if self.reads_reasoning and squeezed(message.get(REASONING, "")) not in squeezed(
            reply_text
        ):
            raise self._refusal(
                f"leaves out part of the {REASONING} of the reply {_shorten(reply)}"
            )
        self._check_tools([message], reply_text)
        # A model never generates text behind the end of the turn (ChatML's newline), so it is not
        # learned.
        trimmed = reply_text.rstrip()
        return trimmed if self.ends_turn(trimmed) else reply_text

    def _check_tools(self, messages: Sequence[Message], text: str) -> None:
        """Check that what messages have of tools is in their text; a template may leave it out
        without a word.
        """
        parts = self.tool_form.list_expected_texts(messages)
        written = squeezed(text) if parts else ""
        for part in parts:
            if max(written.count(squeezed(each)) for each in (part, json_text(part))) < parts.count(
                part
            ):
                raise self._refusal(
                    f"leaves out {_shorten(part)}, of tools or their calls and answers; choose "
                    "another by --chat_template_name"
                )

    def apply(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text that the template writes, with what has to do with tools as it reads that.

        Raises:
            MalformedRow: the template refuses the conversation, cannot write calls or tools, or
                writes far too much.
            InputError: it does not end.
        """
        turns, tools = self.tool_form.convert(messages)
        form = conversation_form(turns, tools, add_generation_prompt=add_generation_prompt)
        is_untried = form not in self._forms_tried and len(self._forms_tried) < MAX_FORMS_TRIED
        variables = template_variables(tools, add_generation_prompt=add_generation_prompt)
        if self.template.is_foreign and is_untried:
            rendering = {**self.tokenizer.special_tokens_map, **variables, "messages": turns}
            refuse_endless(
                self.template.text,
                [rendering],
                template=self.template.name,
                remedy=choose_another(),
            )
            self._forms_tried.add(form)
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                chat_template=self.template.text,
                tokenize=False,
                strftime_now=TEMPLATE_DAY.strftime,
                **variables,
            )
        except Exception as error:  # foreign code, which may raise anything
            raise self._refusal(f"refuses the conversation: {one_line(error)}") from error
        assert isinstance(text, str)
        if len(text) > MAX_RENDERED + 2 * len(str(messages)):
            raise self._refusal(f"writes {len(text):,} characters")
        return text

    def _refusal(self, problem: str) -> MalformedRow:
        return MalformedRow("template", f"{self.template.name} chat template {problem}")

    @cached_property
    def _trailing_question(self) -> str:
        """What the template writes behind a reply, as it asks for the next one whether it is told
        to or not.

        Example: the first template of Llama 3 ends every text with the header of the assistant's
        next turn.
        """
        try:
            asked, plain, whole = (
                self.apply(turns, add_generation_prompt=asks)
                for turns, asks in ((QUESTION, True), (QUESTION, False), (ANSWERED, False))
            )
        except MalformedRow:
            return ""
        _, mark, behind_reply = whole.removeprefix(asked).partition("!")
        if asked != plain or not mark or not whole.startswith(asked):
            return ""
        common = _common_end(asked.rpartition("?")[2], behind_reply)
        if common == behind_reply:  # the user's turn ends as the reply does
            body = common.lstrip()
            end = next((end for end in self._end_tokens if body.startswith(end)), "")
            common = body.removeprefix(end)
        return common if common.strip() else ""

    def _apply_answered(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to its last reply, behind which nothing is asked."""
        return self.apply(messages, add_generation_prompt=False).removesuffix(
            self._trailing_question
        )

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the template, whatever the rows are."""
        try:
            asked = self.apply(QUESTION, add_generation_prompt=True)
            header = self._apply_answered(ANSWERED).removeprefix(asked).partition("!")[0]
            is_deaf = asked == self.apply(QUESTION, add_generation_prompt=False)
        except MalformedRow:  # it wants more than a question and its answer
            return ()
        if not (is_deaf and header.strip()):
            return ()
        return (
            f"{self.template.name} chat template writes the same with and without "
            f"add_generation_prompt, so the header of a reply, {header!r}, is learned as a part "
            "of it: let it write that header where add_generation_prompt is true",
        )

    def ends_turn(self, reply_text: str) -> bool:
        """Whether a rendered reply ends in one of the tokenizer's special tokens."""
        return reply_text.endswith(self._end_tokens)

    def num_ends(self, token_ids: Sequence[int]) -> int:
        """How often a reply ends with its last token, 0 where that is no special token of the
        tokenizer's.

        More than once where the reply's own text ends with the token that the template adds.
        """
        ends = set(self._end_token_ids.values()) & set(token_ids[-1:])
        return next(
            (at for at, token_id in enumerate(reversed(token_ids)) if token_id not in ends),
            len(token_ids),
        )

    def turn_end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a generated reply, ascending: the end of text, and the
        template's end of a turn.

        Example: ChatML ends a turn with `<|im_end|>`; the tokenizer's own end may be
        `<|endoftext|>`: both are in.

        Raises:
            InputError: the tokenizer writes the template's end of a turn as something else than
                that token.
        """
        ends = (
            {self.tokenizer.eos_token_id} if isinstance(self.tokenizer.eos_token_id, int) else set()
        )
        for turns in (ANSWERED, (_SYSTEM, *ANSWERED)):
            with suppress(MalformedRow):  # some templates want a system turn
                text = self._apply_answered(turns).rstrip()
                if self.ends_turn(text):
                    ends.add(self._end_id(text, self.tokenize([text])[0]))
                break
        return tuple(sorted(ends))

    def _end_id(self, text: str, token_ids: Sequence[int]) -> int:
        """The id of the end token that a text ends with.

        Raises:
            InputError: the ids of the text do not end with it.
        """
        ids = {self._end_token_ids[end] for end in self._end_tokens if text.endswith(end)}
        if not token_ids or token_ids[-1] not in ids:
            raise InputError(
                f"the tokenizer of {self.tokenizer.name_or_path} does not write the end of a "
                f"turn, {text[-20:]!r}, as the one token that it is, so no reply would end: use "
                "the tokenizer.json of the model's origin",
                kind="bad_model",
            )
        return token_ids[-1]

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with nothing added: templates write their own special tokens."""
        with panics_as_errors(f"the tokenizer of {self.tokenizer.name_or_path}"):
            return self.tokenizer(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                truncation=False,
                verbose=False,
            )["input_ids"]

    def check_reply(self, reply_text: str, token_ids: Sequence[int]) -> None:
        """Check that the tokens of a rendered reply decode to its text.

        Raises:
            MalformedRow: they do not, or there are none.
        """
        text = self.tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False)
        if not token_ids or composed(reply_text.strip()) not in composed(text):
            raise MalformedRow(
                "tokenizer", f"the tokenizer cannot write the reply {_shorten(reply_text)}"
            )


def composed(text: str) -> str:
    """Text in Unicode form NFKC; tokenizers must leave this unchanged."""
    return unicodedata.normalize("NFKC", text)


def squeezed(text: str) -> str:
    """Text in Unicode form NFKC without white space; templates must leave this unchanged."""
    return "".join(composed(text).split())


def json_text(content: str) -> str:
    """A text as it stands in JSON, without the quotes: some templates write a tool's answer so."""
    return json.dumps(content, ensure_ascii=False)[1:-1]


def _common_end(one: str, other: str) -> str:
    """The longest text that both end with."""
    lengths = range(min(len(one), len(other)), 0, -1)
    return next((one[-length:] for length in lengths if one[-length:] == other[-length:]), "")


def _where_they_part(one: str, other: str) -> str:
    """`'...this' becomes '...that'`, from shortly before the first place where two texts differ."""
    at = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    start = max(0, at - 20)
    return f"{one[start:][:60]!r} becomes {other[start:][:60]!r}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


@contextmanager
def panics_as_errors(name: str) -> Iterator[None]:
    """:raises InputError: the tokenizer library, written in Rust, panics; Python's PanicException
    is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{name} fails on a text ({one_line(error)}): mend its tokenizer.json, or use that of "
            "the model's origin",
            kind="bad_model",
        ) from None
