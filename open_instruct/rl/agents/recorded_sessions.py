"""Sessions of a served model, recorded: conversations that can be learned from, with exact ids.

Each key is a session. A session that its client ends, one that has been silent for long, and each
one at the end, becomes a row for every branch of its tree: `messages` is a conversation as `sft`
reads it, `sampled` has the ids, log-probs and spans that were sampled, `reward` is the client's.
Its requests are written to a file of their own (`saved_requests.py`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.data.sampled.sampled_rows import SAMPLED, SampledBranch, write_sampled
from open_instruct.rewards.finite import read_reward
from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_requests import RunSampling
from open_instruct.rl.agents.endpoint import AgentEndpoint, answer_json, read_body
from open_instruct.rl.agents.finished_session import make_branch
from open_instruct.rl.agents.saved_requests import (
    SUCCESS,
    SavedReply,
    SavedRequest,
    SavedSession,
    SessionSettings,
    find_requests_path,
    save_session,
)
from open_instruct.rl.agents.session import AgentSession, DeliveredReply
from open_instruct.rl.agents.session_tree import SampledReply, SessionTree

if TYPE_CHECKING:
    from aiohttp import web

LOOK_INTERVAL_S = 1.0
REWARD = "reward"


class RecordingEndpoint(AgentEndpoint):
    """An endpoint that opens a session for every key, and writes each one that has ended.

    Args:
        path: of the rows, which are added to it.
        make_session: makes a session, by its number.
        sampling: what requests may ask for.
        settings: of all sessions, which are written with their requests.
        chat_format: the fingerprint of the tokenizer and the template.
        silence_s: after which a session has ended.
    """

    def __init__(
        self,
        path: Path,
        make_session: Callable[[int], AgentSession],
        sampling: RunSampling,
        settings: SessionSettings,
        *,
        chat_format: str,
        silence_s: float,
    ) -> None:
        super().__init__()
        self._path = path
        self._make_session = make_session
        self._sampling = sampling
        self._chat_format = chat_format
        self._settings = settings
        self._silence_s = silence_s
        self._requests: defaultdict[AgentSession, list[SavedRequest]] = defaultdict(list)
        self._num_sessions = 0

    def list_routes(self) -> list[web.RouteDef]:
        from aiohttp import web

        return [*super().list_routes(), web.post("/v1/session/end", self._end_by_client)]

    def find_session(self, key: str) -> tuple[AgentSession, RunSampling]:
        if key not in self._sessions:
            session = self._make_session(self._num_sessions)
            self._num_sessions += 1
            self._sessions[key] = (session, self._sampling)
        return self._sessions[key]

    @contextmanager
    def note_request(
        self, session: AgentSession, path: str, body: Any
    ) -> Iterator[list[DeliveredReply]]:
        """Keep a request with its answer; one that is given up has none, and leaves nothing."""
        request = SavedRequest(path=path, body=body)
        self._requests[session].append(request)
        replies: list[DeliveredReply] = []
        try:
            yield replies
            request.status = SUCCESS
        except APIError as error:
            request.status = error.status
            raise
        finally:
            request.replies = [SavedReply.of(reply.node) for reply in replies]

    async def write_ended_sessions(self) -> None:
        """Write sessions as they end, until this is cancelled; then all that are left."""
        try:
            while True:
                await asyncio.sleep(LOOK_INTERVAL_S)
                for key, (session, _) in list(self._sessions.items()):
                    if session.idle_s > self._silence_s:
                        self._end(key)
        finally:
            for key in list(self._sessions):
                self._end(key)

    async def _end_by_client(self, request: web.Request) -> web.StreamResponse:
        """End the session of the request's key, with the reward that the body gives it."""
        key = self.read_key(request)
        facts = _read_end(await read_body(request))
        if key not in self._sessions or not self._sessions[key][0].tree.replies:
            raise APIError("the session of this key has no reply", status=404)
        return answer_json(self._end(key, facts))

    def _end(self, key: str, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End a session and write its rows, each with `facts`; returns its name and their number.

        The name is no hash of the key, which is secret, and may have had other sessions.
        """
        session, _ = self._sessions[key]
        self.close_session(key)
        name = secrets.token_hex(8)
        rows = list(
            describe_session(
                session.tree,
                name,
                chat_format=self._chat_format,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
            )
        )
        lines = [json.dumps({**row, **(facts or {})}) + "\n" for row in rows]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        saved = SavedSession(
            session=name,
            seed=session.seed,
            settings=self._settings,
            requests=[each for each in self._requests.pop(session, []) if each.status],
        )
        save_session(find_requests_path(self._path), saved)
        return {"session": name, "num_rows": len(rows)}


def _read_end(body: Any) -> dict[str, Any]:
    """What a client says of a session as it ends it: `{"reward": 1.0}`, or nothing.

    Raises:
        APIError: it says something else, or the reward is no number.
    """
    if not isinstance(body, dict) or body.keys() - {REWARD}:
        raise APIError(f'the body is {{"{REWARD}": NUMBER}}, or {{}}')
    if body.get(REWARD) is None:
        return {}
    if isinstance(body[REWARD], bool | str):
        raise APIError("the reward is no number", param=REWARD)
    try:
        return {REWARD: read_reward(body[REWARD], "of the session")}
    except ValueError as error:
        raise APIError(str(error), param=REWARD) from None


def describe_session(tree: SessionTree, name: str, **sampling: Any) -> Iterator[dict[str, Any]]:
    """A row for each branch of a session; the branch of the last reply is the last.

    Args:
        sampling: the fields of a `SampledBranch` that all branches have in common.
    """
    for leaf in sorted(tree.leaves(), key=lambda leaf: leaf.number):
        path = leaf.path()
        branch = make_branch(path, known=set())
        messages, places = list_messages(leaf)
        learned = [place for place, node in enumerate(path) if node.is_learned]
        sampled = SampledBranch(
            prompt_token_ids=branch.prompt_token_ids,
            token_ids=branch.token_ids,
            replies=tuple((reply.start, reply.stop) for reply in branch.replies),
            numbers=tuple(path[place].number for place in learned),
            turns=tuple(places[place] for place in learned),
            logprobs=branch.logprobs,
            is_cut=leaf.completion.is_truncated,
            **sampling,
        )
        yield {
            "messages": messages,
            "session": name,
            "agent": branch.agent,
            SAMPLED: write_sampled(sampled),
        }


def list_messages(leaf: SampledReply) -> tuple[list[dict[str, str]], list[int]]:
    """The conversation up to a reply, in which replies are the texts that were sampled.

    Returns the place of each reply, too.
    """
    messages: list[dict[str, str]] = []
    places: list[int] = []
    for node in leaf.path():
        messages += [dict(turn) for turn in node.new_turns]
        places.append(len(messages))
        messages.append({"role": "assistant", "content": node.completion.text})
    return messages, places
