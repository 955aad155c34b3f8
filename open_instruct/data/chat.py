"""Conversations into text and token ids, with the assistant's turns apart from their context.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from open_instruct.core.errors import InputError
from open_instruct.data.conversations.messages import REASONING, Message
from open_instruct.data.conversations.tool_turns import ToolForm
from open_instruct.data.files.foreign_json import one_line
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.templates.chat_templates import (
    ANSWERED,
    QUESTION,
    ChatTemplate,
    build_variables,
    choose_chat_template,
    find_form,
    render_conversation,
    suggest_template,
)
from open_instruct.data.templates.template_trial import refuse_endless
from open_instruct.data.templates.text_compare import (
    compose,
    describe_difference,
    escape_as_json,
    find_common_end,
    shorten,
    squeeze,
)
from open_instruct.data.tokenizer_panics import refuse_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from open_instruct.config.sections import RowsSection

_SYSTEM: Message = {"role": "system", "content": "."}

# A template that comes with a model runs in Jinja's sandbox, where it could still loop, or write
# far too much.
MAX_FORMS_TRIED = 16
MAX_RENDERED = 2**24  # characters beside those of the conversation
MAX_OPENING = 32  # characters of a reply that a generation prompt may already hold


class ChatFormat:
    """A tokenizer with a chat template: conversations to text, text to token ids.

    It does not know what is learned of a conversation, nor where a row is cut: see `RowBuilder`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.tool_form = ToolForm.detect(template.text)
        self._forms_tried = set(template.forms_tried)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        special.update(tokenizer.all_special_tokens)
        self._end_tokens = tuple(sorted(token for token in special if token.strip()))
        self._end_token_ids = {
            token: tokenizer.backend_tokenizer.token_to_id(token) for token in self._end_tokens
        }

    @classmethod
    def choose(
        cls, tokenizer: PreTrainedTokenizerFast, name: str | None, **choices: Any
    ) -> ChatFormat:
        """The format with the template `name`, or with the tokenizer's own where that is None.

        See `choose_chat_template` for the other choices, and for what is refused.
        """
        return cls(tokenizer, choose_chat_template(tokenizer, name, **choices))

    @classmethod
    def from_flags(cls, tokenizer: PreTrainedTokenizerFast, rows: RowsSection) -> ChatFormat:
        """The format that the flags of a run choose."""
        return cls.choose(
            tokenizer,
            rows.chat_template_name,
            add_bos=rows.add_bos,
            variables=rows.chat_template_kwargs,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that token ids depend on: the tokenizer's content, the template's text."""
        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # Settings of the last call, no content.
        content["truncation"] = None
        content["padding"] = None
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
        """The text of the prompt, and of each reply behind it, up to the end-of-turn token.

        Raises:
            MalformedRow: the template refuses the conversation, does not begin the whole with the
                prompt, or does not write all of a reply.
        """
        prompt_text = self.apply(prompt, add_generation_prompt=True)
        if not prompt_text:
            raise self._template_error("writes nothing before the reply")
        self._check_tools(prompt, prompt_text)
        return prompt_text, tuple(
            self._render_reply(prompt, prompt_text, reply) for reply in replies
        )

    def render_turns(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """The text of a conversation, cut so that every second piece is an assistant's turn.

        Each such piece is what a model would generate there.

        Example: two turns of the user and of the assistant each give prompt, reply, prompt, reply;
        the second prompt starts with what the template writes between a reply and the user's next
        turn.

        Raises:
            MalformedRow: see `render`; or the template writes an earlier turn in another way once
                there is a later one.
        """
        pieces: list[str] = []
        text = ""  # of all pieces so far
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt_text, (reply_text,) = self.render(messages[:turn], [message])
            if not prompt_text.startswith(text):
                last_reply = pieces[-1]
                rewritten = prompt_text[len(text) - len(last_reply) :]
                pieces[-1] = self._change_end(last_reply, rewritten)
                text = "".join(pieces)
            if not prompt_text.startswith(text):
                raise self._template_error(
                    f"writes an earlier reply differently before turn {turn + 1}: "
                    f"{describe_difference(text, prompt_text)}, so no single text teaches every "
                    "turn; make a row of each reply by --split_replies, or choose another "
                    "template by --chat_template_name",
                )
            pieces += [prompt_text[len(text) :], reply_text]
            text = prompt_text + reply_text
        return tuple(pieces)

    def _change_end(self, reply_text: str, rewritten: str) -> str:
        """The reply with the end token that it has in `rewritten`.

        OLMo's template ends earlier turns with another token than the last one.
        """
        last_end = self._find_end(reply_text)
        body = reply_text.removesuffix(last_end)
        for end in self._end_tokens:
            if rewritten.startswith(body + end):
                return body + end
        return reply_text

    def _find_end(self, text: str) -> str:
        """The first of the end tokens that a text ends with, or ""."""
        for end in self._end_tokens:
            if text.endswith(end):
                return end
        return ""

    def _render_reply(self, prompt: Sequence[Message], prompt_text: str, message: Message) -> str:
        whole = self._apply_answered([*prompt, message])
        if not whole.startswith(prompt_text):
            raise self._template_error(
                f"does not write what it asks for the reply with: "
                f"{describe_difference(prompt_text, whole)}, so where the reply starts is not "
                "known; choose another by --chat_template_name",
            )
        reply_text = whole[len(prompt_text) :]
        self._check_reply_is_whole(message, prompt_text, reply_text)
        self._check_tools([message], reply_text)
        # A model never generates text behind the end of the turn (ChatML's newline), so it is not
        # learned.
        trimmed_text = reply_text.rstrip()
        return trimmed_text if self.ends_turn(trimmed_text) else reply_text

    def _check_reply_is_whole(self, message: Message, prompt_text: str, reply_text: str) -> None:
        reply = message["content"]
        squeezed_text = squeeze(reply_text)
        # The generation prompt may hold the first words of the reply, such as <think>.
        starts = range(min(len(reply), MAX_OPENING) or 1)
        is_whole = any(
            prompt_text.endswith(reply[:start]) and squeeze(reply[start:]) in squeezed_text
            for start in starts
        )
        if not is_whole:
            raise self._template_error(f"leaves out part of the reply {shorten(reply)}")
        if self.reads_reasoning and squeeze(message.get(REASONING, "")) not in squeezed_text:
            raise self._template_error(
                f"leaves out part of the {REASONING} of the reply {shorten(reply)}"
            )

    def _check_tools(self, messages: Sequence[Message], text: str) -> None:
        """Check that a text has what messages say of tools, which a template may leave out."""
        expected_texts = self.tool_form.list_expected_texts(messages)
        squeezed_text = squeeze(text) if expected_texts else ""
        for part in expected_texts:
            num_plain = squeezed_text.count(squeeze(part))
            num_as_json = squeezed_text.count(squeeze(escape_as_json(part)))
            if max(num_plain, num_as_json) < expected_texts.count(part):
                raise self._template_error(
                    f"leaves out {shorten(part)}, of tools or their calls and answers; choose "
                    "another by --chat_template_name"
                )

    def apply(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text that the template writes, with tools in the form that it reads.

        Raises:
            MalformedRow: the template refuses the conversation, cannot write calls or tools, or
                writes far too much.
            InputError: it does not end.
        """
        turns, tools = self.tool_form.convert(messages)
        variables = build_variables(tools, add_generation_prompt=add_generation_prompt)
        if self.template.is_foreign:
            self._try_template(turns, tools, variables)
        try:
            text = render_conversation(self.tokenizer, self.template, turns, variables)
        except Exception as error:  # foreign code, which may raise anything
            raise self._template_error(f"refuses the conversation: {one_line(error)}") from error
        if len(text) > MAX_RENDERED + 2 * len(str(messages)):
            raise self._template_error(f"writes {len(text):,} characters")
        return text

    def _try_template(
        self, turns: Sequence[Any], tools: Sequence[Any], variables: Mapping[str, Any]
    ) -> None:
        """Render the first conversation of each form in another process, which can be ended."""
        form = find_form(turns, tools, add_generation_prompt=variables["add_generation_prompt"])
        if form in self._forms_tried or len(self._forms_tried) >= MAX_FORMS_TRIED:
            return
        rendering = {
            **self.tokenizer.special_tokens_map,
            **variables,
            "messages": turns,
        }
        refuse_endless(
            self.template.text,
            [rendering],
            template=self.template.name,
            remedy=suggest_template(),
        )
        self._forms_tried.add(form)

    def _template_error(self, problem: str) -> MalformedRow:
        return MalformedRow("template", f"{self.template.name} chat template {problem}")

    @cached_property
    def _trailing_question(self) -> str:
        """What the template writes behind a reply to ask for the next one, unasked; mostly "".

        Example: the first template of Llama 3 ends every text with the header of the assistant's
        next turn.
        """
        try:
            prompt_text = self.apply(QUESTION, add_generation_prompt=True)
            plain = self.apply(QUESTION, add_generation_prompt=False)
            whole = self.apply(ANSWERED, add_generation_prompt=False)
        except MalformedRow:
            return ""
        _, mark, behind_reply = whole.removeprefix(prompt_text).partition("!")
        if prompt_text != plain or not mark or not whole.startswith(prompt_text):
            return ""
        common = find_common_end(prompt_text.rpartition("?")[2], behind_reply)
        if common == behind_reply:  # the user's turn ends as the reply does
            body = common.lstrip()
            end = next((end for end in self._end_tokens if body.startswith(end)), "")
            common = body.removeprefix(end)
        return common if common.strip() else ""

    def _apply_answered(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to its last reply, behind which nothing is asked."""
        text = self.apply(messages, add_generation_prompt=False)
        return text.removesuffix(self._trailing_question)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the template, whatever the rows are."""
        try:
            prompt_text = self.apply(QUESTION, add_generation_prompt=True)
            answer_text = self._apply_answered(ANSWERED)
            plain = self.apply(QUESTION, add_generation_prompt=False)
        except MalformedRow:  # it wants more than a question and its answer
            return ()
        header, _, _ = answer_text.removeprefix(prompt_text).partition("!")
        if prompt_text != plain or not header.strip():
            return ()
        return (
            f"{self.template.name} chat template writes the same with and without "
            f"add_generation_prompt, so the header of a reply, {header!r}, is learned as a part "
            "of it: let it write that header where add_generation_prompt is true",
        )

    def ends_turn(self, reply_text: str) -> bool:
        """Whether a rendered reply ends in one of the tokenizer's special tokens."""
        return reply_text.endswith(self._end_tokens)

    def count_ends(self, token_ids: Sequence[int]) -> int:
        """How often a reply ends with its last token; 0 where that is no special token.

        It is more than once where the reply's own text ends with the token that the template adds.
        """
        ends = set(self._end_token_ids.values()) & set(token_ids[-1:])
        count = 0
        for token_id in reversed(token_ids):
            if token_id not in ends:
                break
            count += 1
        return count

    def turn_end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a generated reply, ascending.

        They are the tokenizer's end of text, and the template's end of a turn.

        Example: ChatML ends a turn with `<|im_end|>`; the tokenizer's own end may be
        `<|endoftext|>`: both are in.

        Raises:
            InputError: the tokenizer writes the template's end of a turn as something else than
                that token.
        """
        ends = set()
        if isinstance(self.tokenizer.eos_token_id, int):
            ends.add(self.tokenizer.eos_token_id)
        for turns in (ANSWERED, (_SYSTEM, *ANSWERED)):
            with suppress(MalformedRow):  # some templates want a system turn
                text = self._apply_answered(turns).rstrip()
                if self.ends_turn(text):
                    ends.add(self._find_end_id(text))
                break
        return tuple(sorted(ends))

    def _find_end_id(self, text: str) -> int:
        """The id of the end token that a text ends with.

        Raises:
            InputError: the ids of the text do not end with it.
        """
        (token_ids,) = self.tokenize([text])
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
        with refuse_panics(f"the tokenizer of {self.tokenizer.name_or_path}"):
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
        if not token_ids or compose(reply_text.strip()) not in compose(text):
            raise MalformedRow(
                "tokenizer", f"the tokenizer cannot write the reply {shorten(reply_text)}"
            )
