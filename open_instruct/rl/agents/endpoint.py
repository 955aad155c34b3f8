"""The endpoint: OpenAI's API over HTTP, on loopback, for the sessions of a run.

Every session has a key of its own; a key opens nothing else, and nothing once its session is over.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_replies import (
    build_chat,
    build_text,
    describe_model,
    list_models,
    stream_chat,
    stream_text,
)
from open_instruct.rl.agents.api_requests import (
    RunSampling,
    read_chat_request,
    read_completion_requests,
)
from open_instruct.rl.agents.api_responses import (
    build_response,
    read_response_request,
    stream_response,
)
from open_instruct.rl.agents.session import AgentSession, DeliveredReply

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
MAX_BODY_BYTES = 8 << 20
KEY_PREFIX = "sk-session-"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # escaped, of a pair or alone

log = logging.getLogger(__name__)


class AgentEndpoint:
    """Answers the requests of all open sessions. All of it runs in one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[AgentSession, RunSampling]] = {}
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    async def start(self, port: int = 0) -> None:
        """Listen on a port of loopback, or on a free one; does nothing where it listens already.

        Raises:
            OSError: the port cannot be had.
        """
        if self._runner is not None:
            return
        from aiohttp import web

        application = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[_make_error_middleware()]
        )
        application.add_routes(self.list_routes())
        # A request whose client is gone is given up.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def list_routes(self) -> list[web.RouteDef]:
        """The paths that are answered."""
        from aiohttp import web

        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
            web.post("/v1/responses", self._respond),
            web.get("/v1/models", self._list_models),
            web.get("/v1/models/{name:.+}", self._describe_model),
        ]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open_session(self, session: AgentSession, sampling: RunSampling) -> str:
        """Answer the requests of a session from now on; returns its key."""
        key = KEY_PREFIX + secrets.token_urlsafe(24)
        self._sessions[key] = (session, sampling)
        return key

    def close_session(self, key: str) -> None:
        """Refuse the session's key from now on."""
        session, _ = self._sessions.pop(key)
        session.close()

    # Requests

    def _find_session(self, request: web.Request) -> tuple[AgentSession, RunSampling]:
        return self.find_session(self.read_key(request))

    @staticmethod
    def read_key(request: web.Request) -> str:
        """The key that a request has; none is empty."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    def find_session(self, key: str) -> tuple[AgentSession, RunSampling]:
        """Find the session of a key, and what it may ask for.

        Raises:
            APIError: the key opens none.
        """
        found = self._sessions.get(key)
        if found is None:
            raise APIError(
                "this key opens no session: it is wrong, or its episode is over",
                status=401,
                code="invalid_api_key",
            )
        return found

    @contextmanager
    def note_request(
        self, session: AgentSession, path: str, body: Any
    ) -> Iterator[list[DeliveredReply]]:
        """A list for the replies to a request, while it is answered; a subclass may keep them."""
        yield []

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, sampling = self._find_session(request)
        with session.request():
            body = await read_body(request)
            with self.note_request(session, request.path, body) as replies:
                asked = read_chat_request(body, sampling)
                replies += await session.reply(asked)
            answer = build_chat(asked, replies)
            if not asked.streams:
                return answer_json(answer)
            return await _stream(request, stream_chat(answer, has_usage=asked.has_usage))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, sampling = self._find_session(request)
        with session.request():
            body = await read_body(request)
            with self.note_request(session, request.path, body) as replies:
                for asked in read_completion_requests(body, sampling):
                    replies += await session.reply(asked)
            answer = build_text(asked, replies)
            if not asked.streams:
                return answer_json(answer)
            return await _stream(request, stream_text(answer, has_usage=asked.has_usage))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        session, sampling = self._find_session(request)
        with session.request():
            body = await read_body(request)
            with self.note_request(session, request.path, body) as replies:
                asked, turns = read_response_request(body, sampling, session.stored)
                replies += await session.reply(asked)
            answer = build_response(asked, turns, replies[0], session.stored)
            if not asked.streams:
                return answer_json(answer)
            return await _stream(request, stream_response(answer), has_end=False)

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        _, sampling = self._find_session(request)
        return answer_json(list_models(sampling.model_names))

    async def _describe_model(self, request: web.Request) -> web.StreamResponse:
        _, sampling = self._find_session(request)
        name = request.match_info["name"]
        if name not in sampling.model_names:
            raise APIError(f"there is no model {name!r:.100}", status=404, code="model_not_found")
        return answer_json(describe_model(name))


def _make_error_middleware() -> Any:
    """A middleware of aiohttp's that gives every error OpenAI's form."""
    from aiohttp import web

    @web.middleware
    async def answer_errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except APIError as error:
            failure = error
        except web.HTTPRequestEntityTooLarge:
            failure = APIError(f"the body has more than {MAX_BODY_BYTES:,} bytes", status=413)
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}"
            failure = APIError(what, status=error.status)
        except ConnectionError:
            raise  # nobody is there to be answered
        except Exception:  # a fault of ours, which its agent is told of as of any other
            log.exception("%s failed", request.path)
            failure = APIError("the endpoint has failed; its log says how", status=500)
        return web.json_response(failure.as_json(), status=failure.status)

    return answer_errors


async def read_body(request: web.Request) -> Any:
    """The JSON that a request has.

    Raises:
        APIError: it is none, or has half a surrogate pair.
    """
    if request.content_type != "application/json":  # what pages in a browser may send unasked
        raise APIError("the body's Content-Type is application/json", status=415)
    data = await request.read()
    try:
        body = json.loads(data)
        if SURROGATE.search(data):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise APIError("a text has half a surrogate pair") from None
    except (ValueError, RecursionError):
        raise APIError("the body is no JSON") from None
    return body


def answer_json(answer: Mapping[str, Any]) -> web.Response:
    """An answer of JSON."""
    from aiohttp import web

    return web.json_response(answer)


async def _stream(
    request: web.Request, pieces: Iterator[Mapping[str, Any]], *, has_end: bool = True
) -> web.StreamResponse:
    """Send the pieces as events of a stream; one with a `type` is an event of that name."""
    from aiohttp import web

    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    for piece in pieces:
        name = f"event: {piece['type']}\n" if "type" in piece else ""
        await response.write(f"{name}data: {json.dumps(piece)}\n\n".encode())
    if has_end:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
