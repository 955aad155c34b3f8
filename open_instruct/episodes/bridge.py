"""What stands between a reply and the next prompt, in tokens, without tokenising the reply again.

The chat template renders the conversation with a mark in the place of each reply. What follows the last mark is what
stands between that reply and the next one, whatever the reply was: the bridge. So a reply stays as it was sampled, also
under a template that trims earlier replies or takes their thoughts out. A template that moves or drops the marks is
refused.

Texts of tools and environments are tokenised apart from the template's and as plain text, so that an `<|im_end|>` in a
tool's answer is no end of a turn.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from open_instruct.data.chat import ChatFormat, json_text
from open_instruct.environments.environment import ChatMessage
from open_instruct.errors import InputError
from open_instruct.verifiers.verifier import is_thought

# Letters alone, so that no template trims or escapes a mark.
REPLY_MARK = "qzReplyMarkzq{}zq"
CONTENT_MARK = "qzContentMarkzq{}zq"
ANY_MARK = re.compile(r"qzContentMarkzq(\d+)zq")
DESCRIPTION = """\
You may call tools. Their JSON schemas:
{tools}
To call one, answer with a line for each call, and nothing behind it:
<tool_call>{{"name": NAME, "arguments": {{ARGUMENT: VALUE, ...}}}}</tool_call>"""


class TurnTemplate:
    """A chat template, as conversations of several turns need it. It is for one thread, and holds no conversation."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.end_token_ids = frozenset(chat.turn_end_token_ids())
        # A template may end an earlier turn otherwise than the last one, as OLMo's does.
        special = [str(token) for token in chat.tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = tuple(sorted({*special, *chat.tokenizer.all_special_tokens}, key=len, reverse=True))
        self._plain: Any = copy.deepcopy(chat.tokenizer.backend_tokenizer)
        self._plain.encode_special_tokens = True
        added = [str(token) for token in chat.tokenizer.added_tokens_decoder.values() if not token.special]
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if added else None

    def render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        return self._chat.apply(turns, add_generation_prompt=True)

    def with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """The first message has the tools, or where the template reads none, the system turn describes them."""
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
        """A sampled reply as text, special tokens in it too, and whether it ends its turn; the end is left out."""
        has_end = bool(token_ids) and token_ids[-1] in self.end_token_ids
        body = list(token_ids[:-1] if has_end else token_ids)
        return self._chat.tokenizer.backend_tokenizer.decode(body, skip_special_tokens=False), has_end

    def encode(self, text: str, contents: Sequence[str]) -> list[int]:
        """The ids of a template's text, in which marks stand for `contents`."""
        pieces = ANY_MARK.split(text)
        token_ids: list[int] = []
        for position, piece in enumerate(pieces):
            if position % 2:
                token_ids += self._encode_content(contents[int(piece)])
            elif piece:
                (ids,) = self._chat.tokenize([piece])
                token_ids += ids
        return token_ids

    def _encode_content(self, content: str) -> list[int]:
        """Ids of foreign text: no special token, and no other added token either, such as `</tool_response>`."""
        cuts = [match.start() + 1 for match in self._added.finditer(content)] if self._added else []
        pieces = [content[start:stop] for start, stop in pairwise((0, *cuts, len(content)))]
        return [token_id for piece in pieces for token_id in self._plain.encode(piece, add_special_tokens=False).ids]

    def strip_end(self, rest: str) -> str | None:
        """What follows the end token that `rest` begins with; None where it begins with none."""
        end = next((end for end in self._ends if rest.startswith(end)), None)
        return None if end is None else rest[len(end) :]

    def opening_of_reply(self, turns: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """What a prompt has more than the header of a reply, such as `<think>`, and what the header has more."""
        mark = REPLY_MARK.format("Opening")
        prompt = self.render(turns)
        behind = [{"role": "assistant", "content": mark}, {"role": "user", "content": "?"}]
        header = self.render([*turns, *behind]).partition(mark)[0]
        pairs = zip(prompt, header, strict=False)
        common = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(prompt), len(header)))
        return prompt[common:], header[common:]


def check_bridges(chat: ChatFormat) -> None:
    """:raises InputError: the chat template does not say what stands between two turns."""
    talk = Conversation(TurnTemplate(chat), [{"role": "user", "content": "?"}], ())
    (reply,) = chat.tokenize(["!"])
    talk.reply([*reply, min(chat.turn_end_token_ids())])
    talk.answer([{"role": "user", "content": "?"}])


class Conversation:
    """The turns of one episode, as the template has them and as the ids that were and will be sampled from.

    `token_ids` begin with the first prompt. Call `reply` and `answer` in turn.
    """

    def __init__(
        self,
        template: TurnTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._template = template
        # With a mark in the place of each reply.
        self._turns = template.with_tools(messages, tools)
        self._text = template.render(self._turns)
        self._opening, self._header = template.opening_of_reply(self._turns)
        self._has_end = False
        self.token_ids: list[int] = list(prompt_token_ids or template.encode(self._text, ()))

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add a sampled reply, and return its text."""
        text, self._has_end = self._template.text_of(token_ids)
        self.token_ids += token_ids
        return text

    def is_thought(self, text: str) -> bool:
        """Whether a reply to the present prompt is nothing but thoughts that the prompt has begun."""
        return is_thought(self._text, text)

    def answer(self, messages: Sequence[ChatMessage]) -> None:
        """Add what answers the reply: the bridge to the next one.

        Raises:
            InputError: the template does not say what stands between.
        """
        contents = [message["content"] for message in messages]
        literal = [{"role": message["role"], "content": message["content"]} for message in messages]
        marked = [{**message, "content": CONTENT_MARK.format(at)} for at, message in enumerate(literal)]
        mark = REPLY_MARK.format(len(self._turns))
        turns = [*self._turns, {"role": "assistant", "content": self._opening + mark}]
        done = self._text + self._header + mark
        whole = self._template.render([*turns, *literal])
        with_marks = self._template.render([*turns, *marked])
        behind_end = self._template.strip_end(with_marks[len(done) :])
        written = _written(whole, with_marks, contents)
        if not with_marks.startswith(done) or behind_end is None or written is None:
            raise InputError(
                "the chat template does not say what stands between a reply and the next turn: it moves, drops or "
                "rewrites what was written before; choose another by --chat_template_name, or --max_turns 1",
                kind="bad_value",
            )
        self._turns, self._text = [*turns, *literal], whole
        self.token_ids += self._template.encode(behind_end if self._has_end else with_marks[len(done) :], written)


def _written(whole: str, with_marks: str, contents: Sequence[str]) -> list[str] | None:
    """Contents as the template writes them: as they are, trimmed, or as JSON; None where it does something else."""
    for write in (str, str.strip, json_text):
        written = [write(content) for content in contents]
        if ANY_MARK.sub(lambda mark, texts=written: texts[int(mark[1])], with_marks) == whole:  # type: ignore[misc]
            return written
    return None
