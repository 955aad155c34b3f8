"""Environments of an OpenEnv server, by its frames over a WebSocket: `{"type": "reset" | "step",
"data": …}`.

A session is an episode's own. Where an action is one text, the policy plays a game whose moves are
its replies; an action of any other form is a tool that it calls.
"""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.environments.environment import EnvironmentFault, Source, ToolAnswer, tool_schema
from open_instruct.environments.toolbox import Tool, Toolbox

START_TIMEOUT_S = 30.0


class OpenEnvServer(Source):
    """Makes the environments of episodes.

    Example: `OpenEnvServer("http://127.0.0.1:8000", origin="--environment")`.
    """

    def __init__(self, url: str, *, origin: str) -> None:
        self._url = url.rstrip("/")
        self._origin = origin

    def begin_run(self) -> None:
        """Read what its actions are.

        Raises:
            InputError: no server answers there, or its actions are calls of MCP tools.
        """
        try:
            with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running loop
                action = thread.submit(asyncio.run, self._read_schema()).result()["action"]
            fields = {
                name: each for name, each in action["properties"].items() if name != "metadata"
            }
            texts = [name for name, each in fields.items() if each.get("type") == "string"]
        except Exception as error:  # of whatever answers there
            reason = str(error) or type(error).__name__
            raise InputError(
                f"{self._origin}: no OpenEnv server answers at {self._url}/schema: {reason}",
                kind="remote",
            ) from error
        if "tool_name" in fields:
            raise InputError(
                (f"{self._origin}: its actions are MCP's: take its tools by mcp:{self._url}/mcp"),
                kind="bad_value",
            )
        self._text_field = texts[0] if texts and len(fields) == 1 else ""
        self._schema = tool_schema(
            "act", action.get("description", "Takes a step"), {**action, "properties": fields}
        )

    async def _read_schema(self) -> Any:
        import aiohttp  # comes with vLLM

        # Also of a server that sends byte by byte.
        deadline = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=deadline, raise_for_status=True) as client,
            client.get(f"{self._url}/schema") as answer,
        ):
            return json.loads(await answer.read())

    def __call__(self, **row: Any) -> Any:
        session = OpenEnv(self._url, self._text_field)
        return (
            session
            if self._text_field
            else Toolbox([session], {"act": Tool(session.act, self._schema)}, row)
        )


class OpenEnv:
    """A session: a game of texts, which are the `field` of its actions, or the tool `act`."""

    def __init__(self, url: str, field: str) -> None:
        self._url = url
        self._field = field
        self._client: Any = None

    async def reset(self, **row: Any) -> str:
        import aiohttp  # comes with vLLM

        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(f"{self._url}/ws", max_msg_size=0)
        columns = {name: value for name, value in row.items() if name != "messages"}
        return _shown(await self._answer("reset", columns))

    async def step(self, text: str) -> tuple[str, float, bool]:
        answer = await self.act(**{self._field: text})
        return answer.content, answer.reward or 0.0, answer.done

    async def act(self, **action: Any) -> ToolAnswer:
        said = await self._answer("step", action)
        return ToolAnswer(
            content=_shown(said), reward=said.get("reward"), done=bool(said.get("done"))
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _answer(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the server's answer.

        Raises:
            ValueError: the action is none.
            EnvironmentFault: the environment fails, or the server is lost.
        """
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive_json()
            said: Mapping[str, Any] = answer["data"]
        # Of a socket that is closed, by its other end too, or an answer of another form.
        except Exception as error:
            raise EnvironmentFault(
                f"{self._url} is lost: {type(error).__name__}: {error}"
            ) from error
        if answer["type"] == "error":
            fault = ValueError if said.get("code") == "VALIDATION_ERROR" else EnvironmentFault
            raise fault(f"{self._url}: {said}")
        return said


def _shown(said: Mapping[str, Any]) -> str:
    """An observation as text: that of its one field, if it has one, else as JSON."""
    observation = said.get("observation") or {}
    shown = next(iter(observation.values())) if len(observation) == 1 else observation
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
