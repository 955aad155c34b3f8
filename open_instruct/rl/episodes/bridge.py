"""Bridges: the tokens between a reply and the next prompt, without tokenising the reply again.

The chat template renders the conversation with a mark in the place of each reply. The text behind
the last mark is the bridge: it stands between that reply and the next, whatever the reply was. So a
reply stays as it was sampled, also under a template that trims earlier replies or takes their
thoughts out. A template that moves or drops the marks is refused.

Texts of tools and environments are tokenised apart from the template's and as plain text, so that
an `<|im_end|>` in a tool's answer is no end of a turn (foreign_texts.py).
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.records import Span
from open_instruct.data.chat import ChatFormat
from open_instruct.environments.environment import ChatMessage
from open_instruct.rewards.verifier import is_only_thinking
from open_instruct.rl.episodes.foreign_texts import (
    REPLY_MARK,
    ForeignTexts,
    PlainTokenizer,
    split_at_marks,
)

# Ids by the mark that stands for them: of replies that a history repeats.
RepliesByMark = Mapping[str, Sequence[int]]
NO_REPLIES: RepliesByMark = MappingProxyType({})
# What a template reads of a turn that is added.
TURN_KEYS = ("role", "content", "tool_calls")

DESCRIPTION = """\
You may call tools. Their JSON schemas:
{tools}
To call one, answer with a line for each call, and nothing behind it:
<tool_call>{{"name": NAME, "arguments": {{ARGUMENT: VALUE, ...}}}}</tool_call>"""


class TurnTemplate:
    """A chat template, as conversations of several turns need it.

    It is for one thread, and holds no conversation.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.end_token_ids = frozenset(chat.turn_end_token_ids())
        # A template may end an earlier turn otherwise than the last one, as OLMo's does.
        special = [
            str(token) for token in chat.tokenizer.added_tokens_decoder.values() if token.special
        ]
        self._ends = tuple(
            sorted({*special, *chat.tokenizer.all_special_tokens}, key=len, reverse=True)
        )
        self.plain = PlainTokenizer(chat.tokenizer)

    def render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        return self._chat.apply(turns, add_generation_prompt=True)

    def with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Add the tools to the first message, or describe them where the template reads none."""
        if not tools:
            return list(messages)
        if messages and self._chat.tool_form.reads & {"tools", "functions"}:
            return [{**messages[0], "tools": list(tools)}, *messages[1:]]
        system: dict[str, Any] = {"role": "system", "content": ""}
        others = list(messages)
        if messages and messages[0]["role"] == "system":
            system = dict(messages[0])
            others = others[1:]
        schemas = "\n".join(json.dumps(tool) for tool in tools)
        description = DESCRIPTION.format(tools=schemas)
        system["content"] = f"{system['content']}\n\n{description}".strip()
        return [system, *others]

    def write_calls(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the calls of a turn into its text where the template reads no tools.

        They are written as the description of the tools asks for them.
        """
        calls = turn.get("tool_calls")
        if not calls or self._chat.tool_form.reads & {"tools", "functions"}:
            return turn
        lines = [f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in calls]
        return {"role": turn["role"], "content": "\n".join(filter(None, [turn["content"], *lines]))}

    def decode_reply(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Decode a sampled reply with its special tokens, but not the one that ends the turn.

        Returns the text, and whether there was such a token.
        """
        body = list(token_ids)
        has_end = bool(body) and body[-1] in self.end_token_ids
        if has_end:
            body.pop()
        text = self._chat.tokenizer.backend_tokenizer.decode(body, skip_special_tokens=False)
        return text, has_end

    @property
    def num_tokens(self) -> int:
        """Tokens of the tokenizer, added ones too."""
        return len(self._chat.tokenizer)

    def decode_token(self, token_id: int) -> str:
        """The text of one token, special or not; a part of a character has a sign in its place."""
        text: str = self._chat.tokenizer.backend_tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
        return text

    @cached_property
    def _opening_ids(self) -> list[int]:
        opening, _ = self.find_reply_opening([{"role": "user", "content": "?"}])
        return self.encode(opening, ())

    def repeat_reply(self, token_ids: Sequence[int]) -> list[int]:
        """The ids of an earlier reply's content, where a history repeats it.

        Without the token that ends the turn, which the template writes; with what a prompt adds to
        the header of a reply, such as `<think>`.
        """
        body = list(token_ids)
        if body and body[-1] in self.end_token_ids:
            body.pop()
        return [*self._opening_ids, *body]

    def encode(
        self, text: str, contents: Sequence[str], replies: RepliesByMark = NO_REPLIES
    ) -> list[int]:
        """The ids of a template's text, in which marks stand for `contents`."""
        token_ids: list[int] = []
        for ids, _ in self.encode_pieces(text, contents, replies):
            token_ids += ids
        return token_ids

    def encode_pieces(
        self, text: str, contents: Sequence[str], replies: RepliesByMark = NO_REPLIES
    ) -> Iterator[tuple[list[int], bool]]:
        """Encode piece by piece: the ids, and whether they are of a foreign one of `contents`.

        A content that is a mark of `replies` has those ids.
        """
        for position, piece in enumerate(split_at_marks(text)):
            if position % 2:
                content = contents[int(piece)]
                if content in replies:
                    yield list(replies[content]), False
                else:
                    yield self.plain.encode(content), True
            elif piece:
                (ids,) = self._chat.tokenize([piece])
                yield ids, False

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are meant, as where a template wrote it."""
        (token_ids,) = self._chat.tokenize([text])
        return token_ids

    def encode_opening(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        text: str,
        row_texts: Sequence[str],
        replies: RepliesByMark = NO_REPLIES,
    ) -> list[int]:
        """The ids of a first prompt: `text`, as the template writes these messages and tools.

        Only what the template writes, and what the row has, can be a token such as `<tool_call>`;
        only what the template writes can begin or end a turn.

        Raises:
            ValueError: the template rewrites what would otherwise be such a token.
        """
        foreign = ForeignTexts(self.plain)
        marked_messages: list[Mapping[str, Any]] = []
        for message in messages:
            if message.get("content") in replies:
                marked_messages.append({**message, "content": foreign.mark(message["content"])})
            else:
                marked_messages.append(foreign.mark_message(message, row_texts))
        marked_tools = foreign.mark_tokens(tools)
        if not foreign.texts:
            return self.encode(text, ())
        with_marks = self.render(self.with_tools(marked_messages, marked_tools))
        written_texts = foreign.find_written(text, with_marks)
        if written_texts is None:
            raise ValueError(
                "the chat template rewrites a token of its own that stands in a text of the "
                f"environment: leave {foreign.texts[0]!r} out of that text"
            )
        return self.encode(with_marks, written_texts, replies)

    def strip_end(self, rest: str) -> str | None:
        """Take the end token off that `rest` begins with; None where it begins with none."""
        for end in self._ends:
            if rest.startswith(end):
                return rest[len(end) :]
        return None

    def find_reply_opening(self, turns: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Find what a prompt adds to the header of a reply, such as `<think>`, and the reverse."""
        mark = REPLY_MARK.format("Opening")
        prompt = self.render(turns)
        next_turns = [{"role": "assistant", "content": mark}, {"role": "user", "content": "?"}]
        header = self.render([*turns, *next_turns]).partition(mark)[0]
        num_common = 0
        for prompt_character, header_character in zip(prompt, header, strict=False):
            if prompt_character != header_character:
                break
            num_common += 1
        return prompt[num_common:], header[num_common:]


def check_bridges(chat: ChatFormat) -> None:
    """Check that the chat template says what stands between two turns.

    Raises:
        InputError: it does not.
    """
    talk = Conversation(TurnTemplate(chat), [{"role": "user", "content": "?"}], ())
    (reply,) = chat.tokenize(["!"])
    talk.reply([*reply, min(chat.turn_end_token_ids())])
    talk.answer([{"role": "user", "content": "?"}])


class Conversation:
    """The turns of one episode, as a template's text and as the ids that replies are sampled from.

    `token_ids` begin with the first prompt; `answers` are the spans in them of what answered,
    without what the template writes around it. Call `reply` and `answer` in turn.
    """

    def __init__(
        self,
        template: TurnTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompt_token_ids: Sequence[int] | None = None,
        row_texts: Sequence[str] = (),
        replies: RepliesByMark = NO_REPLIES,
    ) -> None:
        """Encode the first prompt.

        Args:
            prompt_token_ids: its ids, if they are known.
            row_texts: texts of the row, with which texts of `messages` may begin.
            replies: the ids of contents that were sampled before, by the marks that stand there.
        """
        self._template = template
        # With a mark in the place of each reply.
        self._turns = template.with_tools(messages, tools)
        self._text = template.render(self._turns)
        self._opening, self._header = template.find_reply_opening(self._turns)
        self._has_end = False
        self.answers: list[Span] = []
        self.token_ids: list[int] = list(
            prompt_token_ids
            or template.encode_opening(
                messages,
                tools,
                text=self._text,
                row_texts=row_texts,
                replies=replies,
            )
        )

    def fork(self) -> "Conversation":
        """A conversation that goes on from here, apart from this one."""
        other = copy.copy(self)
        other.answers = list(self.answers)
        other.token_ids = list(self.token_ids)
        return other

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add a sampled reply, and return its text."""
        text, self._has_end = self._template.decode_reply(token_ids)
        self.token_ids += token_ids
        return text

    def is_only_thinking(self, text: str) -> bool:
        """Whether a reply to the present prompt is only thoughts, which the prompt has begun."""
        return is_only_thinking(self._text, text)

    def answer(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        replies: RepliesByMark = NO_REPLIES,
    ) -> bool:
        """Add the answer to the reply: the bridge to the next one.

        Args:
            messages: the turns of the answer.
            max_tokens: that the answer may have.
            replies: as in the first prompt.

        Returns:
            False, and adds nothing, if the answer alone has more than `max_tokens`. That is known
            before all of it is tokenised.

        Raises:
            InputError: the template does not say what stands between two turns.
            TypeError: a role or a content is no text.
        """
        _check_texts(messages)
        contents = [message["content"] for message in messages]
        if max_tokens is not None and self._template.plain.has_more_tokens(contents, max_tokens):
            return False
        foreign = ForeignTexts(self._template.plain)
        literal = [
            {key: value for key, value in message.items() if key in TURN_KEYS}
            for message in messages
        ]
        marked_turns = list(map(foreign.mark_turn, literal))
        mark = REPLY_MARK.format(len(self._turns))
        turns = [*self._turns, {"role": "assistant", "content": self._opening + mark}]
        beginning = self._text + self._header + mark
        whole = self._template.render([*turns, *literal])
        with_marks = self._template.render([*turns, *marked_turns])
        behind_reply = with_marks[len(beginning) :]
        behind_end = self._template.strip_end(behind_reply)
        written_texts = foreign.find_written(whole[len(beginning) :], behind_reply)
        begins_alike = with_marks.startswith(beginning) and whole.startswith(beginning)
        if not begins_alike or behind_end is None or written_texts is None:
            raise InputError(
                "the chat template does not say what stands between a reply and the next turn: it "
                "moves, drops or rewrites what was written before; choose another by "
                "--chat_template_name, or --max_turns 1",
                kind="bad_value",
            )
        self._turns = [*turns, *literal]
        self._text = whole
        bridge = behind_end if self._has_end else behind_reply
        for ids, is_content in self._template.encode_pieces(bridge, written_texts, replies):
            start = len(self.token_ids)
            self.token_ids += ids
            if is_content:
                self.answers.append(Span(start=start, stop=len(self.token_ids)))
        return True


def _check_texts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that roles and contents are texts; raises a TypeError."""
    for message in messages:
        for part in (message["role"], message["content"]):
            if not isinstance(part, str):
                raise TypeError(f"role and content of a turn are texts, not {part!r:.80}")
