"""The replies of one session as a tree, in which each goes on from exact ids.

An agent sends its whole history with every request. Where that begins with a history that ended in
a sampled reply, the request goes on from the ids of that reply, and only what stands behind it is
tokenised (the bridge). Where the agent rewrote, cut or compacted its history, another branch
begins; replies that the new history repeats still stand there by the ids that they were sampled
with. So nothing sampled is tokenised again, whatever agents do.

The tree knows no network, no engine and no limits. It is for one thread.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.records import Completion
from open_instruct.data.files.rows import MalformedRow
from open_instruct.rl.agents.messages import Turn, describe_turn, make_key
from open_instruct.rl.episodes.bridge import Conversation, TurnTemplate
from open_instruct.rl.episodes.foreign_texts import REPLY_MARK


class HistoryRefused(ValueError):
    """The chat template cannot write a history; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledReply:
    """A reply of the tree, behind the exact ids that it was sampled after.

    Where it has a `parent`, `prompt_token_ids` begin with those of the parent and of its reply.
    """

    number: int  # in the order in which replies were added
    parent: "SampledReply | None"
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    is_learned: bool
    agent: str
    talk: Conversation | None  # up to the end of the reply; none where it goes on a text
    text: str | None  # of the agent's own prompt with the reply, in place of a conversation
    new_turns: tuple[Mapping[str, str], ...]  # of the request, behind the parent's history

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids up to the end of the reply."""
        return self.prompt_token_ids + self.completion.token_ids

    def path(self) -> "list[SampledReply]":
        """The replies from the beginning of its branch to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPoint:
    """Where a reply is to be sampled: behind the ids of `talk`, which nobody may change."""

    parent: SampledReply | None
    talk: Conversation | None = None
    text: str | None = None
    prompt_token_ids: tuple[int, ...]
    history: bytes = b""  # the digest of the request's turns
    new_turns: tuple[Mapping[str, str], ...]
    agent: str = ""

    def is_only_thinking(self, text: str) -> bool:
        """Whether a reply is nothing but thoughts that the prompt has begun."""
        return self.talk is not None and self.talk.is_only_thinking(text)


class SessionTree:
    """The sampled replies of one session.

    Args:
        template: of the policy.
        row_turns: the turns of the row's prompt.
        row_token_ids: the ids of that prompt, where it is asked as it stands.
    """

    def __init__(
        self,
        template: TurnTemplate,
        *,
        row_turns: Sequence[Turn] = (),
        row_token_ids: Sequence[int] = (),
    ) -> None:
        self._template = template
        self._row_turns = [_pick_text(turn) for turn in row_turns]
        self._row_token_ids = tuple(row_token_ids)
        self._row_texts = [turn["content"] for turn in self._row_turns]
        self._by_history: dict[bytes, SampledReply] = {}
        self._by_turn: dict[str, SampledReply] = {}
        # No text of a request can be one.
        self._mark_prefix = f"Known{secrets.token_hex(8)}"
        self.replies: list[SampledReply] = []

    def open(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], agent: str = ""
    ) -> ReplyPoint:
        """Find the exact ids that the reply to these turns is sampled after.

        Args:
            turns: of the request.
            tools: that it offers.
            agent: who asks; nobody goes on from the replies of another.

        Raises:
            HistoryRefused: the template cannot write them.
        """
        digests = _digest_histories(turns, [agent, tools])
        for num_known in range(len(turns), 0, -1):
            parent = self._by_history.get(digests[num_known])
            if parent is None:
                continue
            talk = self._continue(parent, turns[num_known:])
            if talk is not None:
                return self._make_point(parent, talk, digests[-1], turns[num_known:], agent)
        try:
            talk = self._begin(turns, tools)
        except (InputError, MalformedRow, TypeError, ValueError) as error:
            raise HistoryRefused(str(error)) from error
        return self._make_point(None, talk, digests[-1], turns, agent)

    def open_text(self, prompt: str | tuple[int, ...], agent: str = "") -> ReplyPoint:
        """Find the exact ids of a prompt that the agent has written itself, as a text or as ids.

        One that begins with an earlier prompt and its reply goes on from the ids of that reply.
        """
        own = [node for node in self.replies if node.agent == agent]
        parent = None
        text = None
        if isinstance(prompt, str):
            text = prompt
            parents = [node for node in own if node.text and prompt.startswith(node.text)]
            parent = max(parents, key=lambda node: len(node.text or ""), default=None)
            rest = prompt
            token_ids: tuple[int, ...] = ()
            if parent is not None:
                rest = prompt[len(parent.text or "") :]
                token_ids = parent.token_ids
                if token_ids[-1] in self._template.end_token_ids:
                    # Which the agent may write, as it is not in the text that it was given.
                    rest = self._template.strip_end(rest) or rest
            token_ids += tuple(self._template.encode_text(rest))
        else:
            known = [node for node in own if node.token_ids == prompt[: len(node.token_ids)]]
            parent = max(known, key=lambda node: len(node.token_ids), default=None)
            token_ids = prompt
            rest = f"{len(prompt)} token ids"
        return ReplyPoint(
            parent=parent,
            agent=agent,
            text=text,
            prompt_token_ids=token_ids,
            new_turns=({"role": "prompt", "content": rest},),
        )

    def add(
        self,
        point: ReplyPoint,
        completion: Completion,
        turn: Turn,
        *,
        is_learned: bool = True,
    ) -> SampledReply:
        """Add a reply that was sampled at `point`; returns it.

        Args:
            turn: as the agent is told of the reply, and will repeat it.
            is_learned: whether it was sampled as the run samples.
        """
        talk = None
        if point.talk is not None:
            talk = point.talk.fork()
            talk.reply(completion.token_ids)
        node = SampledReply(
            number=len(self.replies),
            parent=point.parent,
            prompt_token_ids=point.prompt_token_ids,
            completion=completion,
            is_learned=is_learned,
            agent=point.agent,
            talk=talk,
            text=None if point.text is None else point.text + turn["content"],
            new_turns=point.new_turns,
        )
        self.replies.append(node)
        if talk is None:
            return node
        self._by_history[_digest(point.history, make_key(turn))] = node
        if turn["content"].strip() or turn.get("tool_calls"):
            self._by_turn[make_key(turn)] = node
        return node

    def leaves(self) -> list[SampledReply]:
        """The last reply of every branch, in the order in which they were added."""
        parents = {id(node.parent) for node in self.replies}
        return [node for node in self.replies if id(node) not in parents]

    def _make_point(
        self,
        parent: SampledReply | None,
        talk: Conversation,
        history: bytes,
        new_turns: Sequence[Turn],
        agent: str,
    ) -> ReplyPoint:
        return ReplyPoint(
            agent=agent,
            parent=parent,
            talk=talk,
            prompt_token_ids=tuple(talk.token_ids),
            history=history,
            new_turns=tuple(map(describe_turn, new_turns)),
        )

    def _continue(self, parent: SampledReply, turns: Sequence[Turn]) -> Conversation | None:
        """The parent's conversation with a bridge over these turns; None if there can be none."""
        if parent.talk is None:
            return None
        marked_turns, replies = self._mark_known_replies(turns)
        talk = parent.talk.fork()
        try:
            talk.answer(marked_turns, replies=replies)
        except (InputError, MalformedRow, TypeError, ValueError):
            return None  # from the beginning, it is refused with the reason, if it must be
        return talk

    def _begin(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> Conversation:
        is_row = not tools and [dict(turn) for turn in turns] == self._row_turns
        marked_turns, replies = self._mark_known_replies(turns)
        return Conversation(
            self._template,
            marked_turns,
            tools,
            prompt_token_ids=self._row_token_ids if is_row else None,
            row_texts=self._row_texts,
            replies=replies,
        )

    def _mark_known_replies(
        self, turns: Sequence[Turn]
    ) -> tuple[list[Turn], dict[str, Sequence[int]]]:
        """Put marks in the place of replies that were sampled; returns their ids, too."""
        marked_turns: list[Turn] = []
        replies: dict[str, Sequence[int]] = {}
        for turn in turns:
            node = self._by_turn.get(make_key(turn)) if turn["role"] == "assistant" else None
            if node is None:
                marked_turns.append(self._template.write_calls(turn))
                continue
            mark = REPLY_MARK.format(f"{self._mark_prefix}x{node.number}x")
            replies[mark] = self._template.repeat_reply(node.completion.token_ids)
            marked_turns.append({"role": "assistant", "content": mark})
        return marked_turns, replies


def _pick_text(turn: Turn) -> Turn:
    """The role and the text of a row's turn."""
    return {"role": turn["role"], "content": turn["content"]}


def _digest_histories(turns: Sequence[Turn], setting: Sequence[Any]) -> list[bytes]:
    """The digests of the first 0, 1, 2, … turns, with the setting in which they are."""
    digests = [_digest(b"", json.dumps(setting, sort_keys=True))]
    for turn in turns:
        digests.append(_digest(digests[-1], make_key(turn)))
    return digests


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
