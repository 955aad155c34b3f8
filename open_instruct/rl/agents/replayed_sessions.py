"""Recorded sessions once more: every request is sent again, and its ids are compared."""

import json
from collections.abc import Sequence

from open_instruct.rl.agents.endpoint import HOST, AgentEndpoint
from open_instruct.rl.agents.saved_requests import (
    SUCCESS,
    SavedReply,
    SavedRequest,
    SavedSession,
)
from open_instruct.rl.agents.session import AgentSession

MAX_TEXT_SHOWN = 300


async def replay_session(
    endpoint: AgentEndpoint,
    session: AgentSession,
    key: str,
    saved: SavedSession,
) -> str:
    """Send the requests of a session again, one after another.

    Args:
        endpoint: that answers them.
        session: a new one, in the place of the recorded one.
        key: that opens it.

    Returns:
        What differs in the first request that differs; "" where none does.
    """
    import aiohttp  # comes with vLLM

    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
        for number, request in enumerate(saved.requests, 1):
            num_known = len(session.tree.replies)
            body = json.dumps(request.body, ensure_ascii=False).encode()
            url = f"http://{HOST}:{endpoint.port}{request.path}"
            async with client.post(url, data=body) as answer:
                text = await answer.text(errors="replace")
            replies = [SavedReply.of(reply) for reply in session.tree.replies[num_known:]]
            difference = describe_difference(request, answer.status, text, replies)
            if difference:
                return f"request {number} of {len(saved.requests)} ({request.path}): {difference}"
    return ""


def describe_difference(
    request: SavedRequest,
    status: int,
    text: str,
    replies: Sequence[SavedReply],
) -> str:
    """What differs in the answer to a request, as a sentence; "" where nothing does.

    Args:
        request: with the answer that was recorded.
        status: of the new answer.
        text: its body.
        replies: that it has.
    """
    if status != request.status:
        reason = "" if status == SUCCESS else f": {text[:MAX_TEXT_SHOWN]}"
        return f"the status was {request.status} and is {status}{reason}"
    if len(replies) != len(request.replies):
        return f"the answer had {len(request.replies)} replies and has {len(replies)}"
    for number, (old, new) in enumerate(zip(request.replies, replies, strict=True), 1):
        for name in ("prompt_token_ids", "token_ids"):
            difference = find_first_difference(getattr(old, name), getattr(new, name))
            if difference:
                what = "prompt" if name == "prompt_token_ids" else "reply"
                return f"{what} {number} of the answer, {difference}"
    return ""


def find_first_difference(old: Sequence[int], new: Sequence[int]) -> str:
    """Where two rows of ids first differ, as words; "" where they are equal."""
    for position, (old_id, new_id) in enumerate(zip(old, new, strict=False)):
        if old_id != new_id:
            return f"token {position + 1}: the id was {old_id} and is {new_id}"
    if len(old) != len(new):
        return f"token {min(len(old), len(new)) + 1}: {len(old)} ids were there, {len(new)} are"
    return ""
