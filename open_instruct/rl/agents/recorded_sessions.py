"""Sessions of a served model, recorded: conversations that can be learned from, with exact ids.

Each key is a session. A session that has been silent for long, and each one at the end, becomes a
row for every branch of its tree: `messages` is a conversation as `sft` reads it, `sampled` has the
ids, log-probs and spans that were sampled.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from open_instruct.rl.agents.api_requests import RunSampling
from open_instruct.rl.agents.endpoint import AgentEndpoint
from open_instruct.rl.agents.finished_session import make_branch
from open_instruct.rl.agents.session import AgentSession
from open_instruct.rl.agents.session_tree import SampledReply, SessionTree

LOOK_INTERVAL_S = 1.0


class RecordingEndpoint(AgentEndpoint):
    """An endpoint that opens a session for every key, and writes each one that has ended.

    Args:
        path: of the rows, which are added to it.
        make_session: makes a session, by its number.
        sampling: what requests may ask for.
        silence_s: after which a session has ended.
    """

    def __init__(
        self,
        path: Path,
        make_session: Callable[[int], AgentSession],
        sampling: RunSampling,
        *,
        silence_s: float,
    ) -> None:
        super().__init__()
        self._path = path
        self._make_session = make_session
        self._sampling = sampling
        self._silence_s = silence_s
        self._num_sessions = 0

    def find_session(self, key: str) -> tuple[AgentSession, RunSampling]:
        if key not in self._sessions:
            session = self._make_session(self._num_sessions)
            self._num_sessions += 1
            self._sessions[key] = (session, self._sampling)
        return self._sessions[key]

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

    def _end(self, key: str) -> None:
        session, _ = self._sessions[key]
        self.close_session(key)
        name = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()  # the key itself is secret
        rows = [json.dumps(row) + "\n" for row in describe_session(session.tree, name)]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(rows)


def describe_session(tree: SessionTree, name: str) -> Iterator[dict[str, Any]]:
    """A row for each branch of a session; the branch of the last reply is the last."""
    known: set[int] = set()
    for leaf in tree.leaves():
        path = leaf.path()
        branch = make_branch(path, known)
        known |= {node.number for node in path}
        spans = [[reply.start, reply.stop] for reply in branch.replies]
        yield {
            "messages": list_messages(leaf),
            "session": name,
            "agent": branch.agent,
            "sampled": {
                "prompt_token_ids": branch.prompt_token_ids,
                "token_ids": branch.token_ids,
                "replies": spans,
                "num_shared": branch.num_shared,
                "logprobs": branch.logprobs,
            },
        }


def list_messages(leaf: SampledReply) -> list[dict[str, str]]:
    """The conversation up to a reply, in which replies are the texts that were sampled."""
    messages: list[dict[str, str]] = []
    for node in leaf.path():
        messages += [dict(turn) for turn in node.new_turns]
        messages.append({"role": "assistant", "content": node.completion.text})
    return messages
