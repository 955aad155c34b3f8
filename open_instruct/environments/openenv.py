"""Environments of an OpenEnv server, over a WebSocket: `{"type": "reset" | "step", "data": …}`.

Each episode has a session. If an action is one text, the policy plays a game whose moves are its
replies; an action of any other form is a tool that it calls.
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
        """Read the schema of its actions.

        Raises:
            InputError: no server answers there, or its actions are calls of MCP tools.
        """
        try:
            with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running loop
                action = thread.submit(asyncio.run, self._read_schema()).result()["action"]
            fields = dict(action["properties"])
            fields.pop("metadata", None)
            texts = [name for name, field in fields.items() if field.get("type") == "string"]
        except Exception as error:  # of whatever answers there
            reason = str(error) or type(error).__name__
            raise InputError(
                f"{self._origin}: no OpenEnv server answers at {self._url}/schema: {reason}",
                kind="remote",
            ) from error
        if "tool_name" in fields:
            raise InputError(
                f"{self._origin}: its actions are MCP's: take its tools by mcp:{self._url}/mcp",
                kind="bad_value",
            )
        self._text_field = ""
        if texts and len(fields) == 1:
            self._text_field = texts[0]
        description = action.get("description", "Takes a step")
        self._schema = tool_schema("act", description, {**action, "properties": fields})

    async def _read_schema(self) -> Any:
        import aiohttp  # comes with vLLM

        # The limit is for the whole answer, as a server may send byte by byte.
        deadline = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=deadline, raise_for_status=True) as client,
            client.get(f"{self._url}/schema") as answer,
        ):
            return json.loads(await answer.read())

    def __call__(self, **row: Any) -> Any:
        session = OpenEnv(self._url, self._text_field)
        if self._text_field:
            return session
        return Toolbox([session], {"act": Tool(session.act, self._schema)}, row)


class OpenEnv:
    """One session: a game whose moves are the `field` of its actions, or the tool `act`."""

    def __init__(self, url: str, field: str) -> None:
        self._url = url
        self._field = field
        self._client: Any = None

    async def reset(self, **row: Any) -> str:
        import aiohttp  # comes with vLLM

        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(f"{self._url}/ws", max_msg_size=0)
        columns = {name: value for name, value in row.items() if name != "messages"}
        return _observation_text(await self._send("reset", columns))

    async def step(self, text: str) -> tuple[str, float, bool]:
        answer = await self.act(**{self._field: text})
        return answer.content, answer.reward or 0.0, answer.done

    async def act(self, **action: Any) -> ToolAnswer:
        result = await self._send("step", action)
        return ToolAnswer(
            content=_observation_text(result),
            reward=result.get("reward"),
            done=bool(result.get("done")),
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _send(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a frame, and return the data of the server's answer.

        Raises:
            ValueError: the action is not valid.
            EnvironmentFault: the environment fails, or the server is lost.
        """
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive_json()
            result: Mapping[str, Any] = answer["data"]
        # The socket was closed at either end, or the answer has another form.
        except Exception as error:
            raise EnvironmentFault(
                f"{self._url} is lost: {type(error).__name__}: {error}"
            ) from error
        if answer["type"] == "error":
            if result.get("code") == "VALIDATION_ERROR":
                raise ValueError(f"{self._url}: {result}")
            raise EnvironmentFault(f"{self._url}: {result}")
        return result


def _observation_text(result: Mapping[str, Any]) -> str:
    """An observation as text: the value of its only field, or all of it as JSON."""
    observation = result.get("observation") or {}
    if len(observation) == 1:
        (observation,) = observation.values()
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, ensure_ascii=False)
