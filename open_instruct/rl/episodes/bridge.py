"""What stands between a reply and the next prompt, in tokens, without tokenising the reply again.

The chat template renders the conversation with a mark in the place of each reply. What follows the
last mark is what stands between that reply and the next one, whatever the reply was: the bridge. So
a reply stays as it was sampled, also under a template that trims earlier replies or takes their
thoughts out. A template that moves or drops the marks is refused.

Texts of tools and environments are tokenised apart from the template's and as plain text, so that
an `<|im_end|>` in a tool's answer is no end of a turn (foreign_texts.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
        """The first message has the tools, or where the template reads none, the system turn
        describes them.
        """
        if not tools:
            return list(messages)
        if messages and self._chat.tool_form.reads & {"tools", "functions"}:
            return [{**messages[0], "tools": list(tools)}, *messages[1:]]
        has_system = bool(messages) and messages[0]["role"] == "system"
        system = dict(messages[0]) if has_system else {"role": "system", "content": ""}
        described = DESCRIPTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
        system["content"] = f"{system['content']}\n\n{described}".strip()
        return [system, *messages[1 if has_system else 0 :]]

    def text_of(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """A sampled reply as text, special tokens in it too, and whether it ends its turn; the end
        is left out.
        """
        has_end = bool(token_ids) and token_ids[-1] in self.end_token_ids
        body = list(token_ids[:-1] if has_end else token_ids)
        return self._chat.tokenizer.backend_tokenizer.decode(
            body, skip_special_tokens=False
        ), has_end

    def encode(self, text: str, contents: Sequence[str]) -> list[int]:
        """The ids of a template's text, in which marks stand for `contents`."""
        return [token_id for ids, _ in self.encode_pieces(text, contents) for token_id in ids]

    def encode_pieces(self, text: str, contents: Sequence[str]) -> Iterator[tuple[list[int], bool]]:
        """The same, piece by piece: the ids, and whether they are of one of `contents`."""
        for position, piece in enumerate(split_at_marks(text)):
            if position % 2:
                yield self.plain.encode(contents[int(piece)]), True
            elif piece:
                (ids,) = self._chat.tokenize([piece])
                yield ids, False

    def encode_opening(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        text: str,
        row_texts: Sequence[str],
    ) -> list[int]:
        """The ids of a first prompt: `text`, as the template writes these messages and tools.

        Only what the template writes, and what the row has, can be a token such as `<tool_call>`;
        only what the template writes can begin or end a turn.

        Raises:
            ValueError: the template rewrites what would otherwise be such a token.
        """
        foreign = ForeignTexts(self.plain)
        marked_messages = [foreign.mark_message(message, row_texts) for message in messages]
        marked_tools = foreign.mark_tokens(tools)
        if not foreign.texts:
            return self.encode(text, ())
        with_marks = self.render(self.with_tools(marked_messages, marked_tools))
        written = foreign.find_written(text, with_marks)
        if written is None:
            raise ValueError(
                "the chat template rewrites a token of its own that stands in a text of the "
                f"environment: leave {foreign.texts[0]!r} out of that text"
            )
        return self.encode(with_marks, written)

    def strip_end(self, rest: str) -> str | None:
        """What follows the end token that `rest` begins with; None where it begins with none."""
        end = next((end for end in self._ends if rest.startswith(end)), None)
        return None if end is None else rest[len(end) :]

    def find_reply_opening(self, turns: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """What a prompt has more than the header of a reply, such as `<think>`, and what the header
        has more.
        """
        mark = REPLY_MARK.format("Opening")
        prompt = self.render(turns)
        behind = [{"role": "assistant", "content": mark}, {"role": "user", "content": "?"}]
        header = self.render([*turns, *behind]).partition(mark)[0]
        pairs = zip(prompt, header, strict=False)
        common = next(
            (at for at, (one, other) in enumerate(pairs) if one != other),
            min(len(prompt), len(header)),
        )
        return prompt[common:], header[common:]


def check_bridges(chat: ChatFormat) -> None:
    """:raises InputError: the chat template does not say what stands between two turns."""
    talk = Conversation(TurnTemplate(chat), [{"role": "user", "content": "?"}], ())
    (reply,) = chat.tokenize(["!"])
    talk.reply([*reply, min(chat.turn_end_token_ids())])
    talk.answer([{"role": "user", "content": "?"}])


class Conversation:
    """The turns of one episode, as the template has them and as the ids that were and will be
    sampled from.

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
    ) -> None:
        """`row_texts` are those of the row, with which texts of `messages` may begin."""
        self._template = template
        # With a mark in the place of each reply.
        self._turns = template.with_tools(messages, tools)
        self._text = template.render(self._turns)
        self._opening, self._header = template.find_reply_opening(self._turns)
        self._has_end = False
        self.answers: list[Span] = []
        self.token_ids: list[int] = list(
            prompt_token_ids
            or template.encode_opening(messages, tools, text=self._text, row_texts=row_texts)
        )

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add a sampled reply, and return its text."""
        text, self._has_end = self._template.text_of(token_ids)
        self.token_ids += token_ids
        return text

    def is_only_thinking(self, text: str) -> bool:
        """Whether a reply to the present prompt is nothing but thoughts that the prompt has
        begun.
        """
        return is_only_thinking(self._text, text)

    def answer(self, messages: Sequence[ChatMessage], *, max_tokens: int | None = None) -> bool:
        """Add what answers the reply: the bridge to the next one.

        Returns:
            False, and nothing is added, where the answer alone has more than `max_tokens`. That is
            known before all of it is tokenised.

        Raises:
            InputError: the template does not say what stands between.
            TypeError: a role or a content is no text.
        """
        parts: list[Any] = [
            part for message in messages for part in (message["role"], message["content"])
        ]
        if odd := [part for part in parts if not isinstance(part, str)]:
            raise TypeError(f"role and content of a turn are texts, not {odd[0]!r:.80}")
        contents = [message["content"] for message in messages]
        if max_tokens is not None and self._template.plain.has_more_tokens(contents, max_tokens):
            return False
        foreign = ForeignTexts(self._template.plain)
        literal = [{"role": message["role"], "content": message["content"]} for message in messages]
        marked = [
            {"role": foreign.mark_tokens(each["role"]), "content": foreign.mark(each["content"])}
            for each in literal
        ]
        mark = REPLY_MARK.format(len(self._turns))
        turns = [*self._turns, {"role": "assistant", "content": self._opening + mark}]
        done = self._text + self._header + mark
        whole = self._template.render([*turns, *literal])
        with_marks = self._template.render([*turns, *marked])
        behind_reply = with_marks[len(done) :]
        behind_end = self._template.strip_end(behind_reply)
        written = foreign.find_written(whole[len(done) :], behind_reply)
        begins_alike = with_marks.startswith(done) and whole.startswith(done)
        if not begins_alike or behind_end is None or written is None:
            raise InputError(
                "the chat template does not say what stands between a reply and the next turn: it "
                "moves, drops or rewrites what was written before; choose another by "
                "--chat_template_name, or --max_turns 1",
                kind="bad_value",
            )
        self._turns, self._text = [*turns, *literal], whole
        bridge = behind_end if self._has_end else behind_reply
        for ids, is_content in self._template.encode_pieces(bridge, written):
            start = len(self.token_ids)
            self.token_ids += ids
            if is_content:
                self.answers.append(Span(start=start, stop=len(self.token_ids)))
        return True
