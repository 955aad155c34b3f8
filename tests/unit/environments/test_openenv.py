"""Environments of an OpenEnv server, against one that speaks its frames."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.environments import openenv
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.environment import EnvironmentFault, Opening, Reply, Turn, begin_run
from open_instruct.environments.registry import find_factory, known_environments
from tests.refusals import refused
from tests.unit.environments.test_environments import USER, Asked, ask, calls, decoded, tokenizer  # noqa: F401  # fixtures
from tests.unit.rewards.sandbox.test_sandbox import wait_until

web = pytest.importorskip("aiohttp.web", reason="comes with vLLM")

METADATA = {"metadata": {"type": "object", "additionalProperties": True}}
ACTIONS = {
    "text": {"message": {"type": "string"}},
    "move": {"column": {"type": "integer"}, "fast": {"type": "boolean", "default": False}},
    "prose": {"any": True},
    "mcp": {
        "type": {"const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
}


def answered(kind: str, counter: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """As OpenEnv's server answers, for an environment that counts to the `target` of its reset."""
    data = message.get("data", {})
    if message["type"] == "reset":
        counter.update(target=data.get("target", 2), at=0)
        return {
            "type": "observation",
            "data": {"observation": {"told": "Go."}, "reward": None, "done": False},
        }
    if set(data) - set(ACTIONS[kind]) or not isinstance(data.get("column", 0), int):
        error = {
            "message": "Invalid message",
            "code": "VALIDATION_ERROR",
            "errors": [{"loc": ["column"]}],
        }
        return {"type": "error", "data": error}
    if data.get("message") == "break" or data.get("column") == 13:
        return {
            "type": "error",
            "data": {"message": "the world is gone", "code": "EXECUTION_ERROR"},
        }
    counter["at"] += 1
    done = counter["at"] == counter["target"]
    observation = (
        {"told": f"At {counter['at']}."} if kind == "text" else {"at": counter["at"], "said": data}
    )
    return {
        "type": "observation",
        "data": {"observation": observation, "reward": float(done), "done": done},
    }


class Server:
    """An OpenEnv server on a thread of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_open = 0
        self.num_bytes = 0
        self.resets: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._run(self._started())}"

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _started(self) -> int:
        app = web.Application()
        app.add_routes([web.get("/schema", self.schema), web.get("/ws", self.session)])
        self.runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return int(site._server.sockets[0].getsockname()[1])

    async def schema(self, request: Any) -> Any:
        if self.kind == "drip":
            return await self._drip(request)
        action = {
            "type": "object",
            "properties": METADATA | ACTIONS[self.kind],
            "additionalProperties": False,
        }
        action |= {"description": "A move of the game.", "required": list(ACTIONS[self.kind])[:1]}
        return web.json_response({"action": action, "observation": {}, "state": {}})

    async def _drip(self, request: Any) -> Any:
        """Send a byte every 50 ms, for 10 s."""
        answer = web.StreamResponse()
        await answer.prepare(request)
        for self.num_bytes in range(200):
            await answer.write(b" ")
            await asyncio.sleep(0.05)
        return answer

    async def session(self, request: Any) -> Any:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_open += 1
        counter: dict[str, Any] = {}
        async for message in socket:
            said = json.loads(message.data)
            if said["type"] == "reset":
                self.resets.append(said["data"])
            if said.get("data", {}).get("message") == "hang up":
                break
            await socket.send_json(answered(self.kind, counter, said))
        self.num_open -= 1
        return socket

    def close(self) -> None:
        self._run(self.runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.close()


def played(url: str, *episodes: list[Reply], **row: Any) -> list[tuple[Opening, list[Turn]]]:
    """Episodes that are open at the same time, and play turn by turn."""
    name = f"openenv:{url}"
    factory = known_environments(EnvironmentSection(environment=name))[name]
    begin_run(factory)

    async def play(replies: list[Reply]) -> tuple[Opening, list[Turn]]:
        environment = make_environment(factory, {"messages": [USER], **row})
        try:
            opening = await environment.start()
            await asyncio.sleep(0.1)
            return opening, [await environment.step(reply) for reply in replies]
        finally:
            await environment.close()

    async def play_all() -> list[tuple[Opening, list[Turn]]]:
        return await asyncio.gather(*map(play, episodes))

    return asyncio.run(play_all())


@pytest.mark.parametrize("server", ["text"], indirect=True)
def test_game_is_played_in_texts(server: Server) -> None:
    move = Reply(text="on")
    (opening, turns), (_, others) = played(
        server.url, [move, move, move], [move], target=3, level="hard"
    )
    assert (
        opening.messages == [{"role": "user", "content": "What is 2 + 3?\n\nGo."}]
        and not opening.tools
    )
    assert [turn.messages[0]["content"] for turn in turns] == ["At 1.", "At 2.", "At 3."]
    assert [(turn.done, turn.rewards) for turn in turns] == [
        (False, {"openenv": 0.0}),
        (False, {"openenv": 0.0}),
        (True, {"openenv": 1.0}),
    ]
    assert others[0].messages[0]["content"] == "At 1.", "every episode has a session of its own"
    assert server.resets == [{"target": 3, "level": "hard"}] * 2
    assert wait_until(lambda: server.num_open == 0), "a session ends with its episode"


@pytest.mark.parametrize("server", ["move"], indirect=True)
def test_action_of_another_form_is_a_tool(server: Server) -> None:
    replies = [
        calls("act", column=3),
        calls("act", column="left"),
        calls("act", column=4, fast=True),
    ]
    ((opening, turns),) = played(server.url, replies)
    (tool,) = opening.tools
    assert (
        tool["function"]["name"] == "act"
        and tool["function"]["description"] == "A move of the game."
    )
    parameters = tool["function"]["parameters"]
    assert parameters["properties"] == ACTIONS["move"] and parameters["required"] == ["column"]
    first, wrong, last = (turn.messages[0]["content"] for turn in turns)
    assert json.loads(first) == {"at": 1, "said": {"column": 3}} and '"fast": true' in last
    assert "VALIDATION_ERROR" in wrong and "column" in wrong, "the policy is told of its mistake"
    assert (
        turns[0].rewards == {"openenv": 0.0}
        and turns[2].done
        and turns[2].rewards == {"openenv": 1.0}
    )


@pytest.mark.parametrize(
    ("server", "said"), [("text", "break"), ("text", "hang up")], indirect=["server"]
)
def test_fault_of_the_server_is_no_fault_of_the_policy(
    server: Server,
    said: str,
    ask: Callable[..., Asked],  # noqa: F811
) -> None:
    factory = find_factory(f"openenv:{server.url}", origin="")
    begin_run(factory)
    completion, _ = ask(factory, [f"{said}<|im_end|>"], environment_timeout_s=20)
    assert completion.episode is not None and completion.episode.status == "env_error"
    told = "the world is gone" if said == "break" else "is lost"
    assert told in completion.episode.problem and "EnvironmentFault" in completion.episode.problem


@pytest.mark.parametrize("server", ["mcp", "move", "prose"], indirect=True)
def test_openenv_server_without_answer_is_refused(server: Server) -> None:
    if server.kind == "prose":
        with refused("remote", "environment", "/schema"):
            played(server.url)
    elif server.kind == "mcp":
        with refused("bad_value", "environment", f"mcp:{server.url}/mcp"):
            played(server.url)
    else:
        with pytest.raises(EnvironmentFault, match="the world is gone"):
            played(server.url, [calls("act", column=13)])
    with refused("remote", "environment", "openenv:http://127.0.0.1:9"):
        played("http://127.0.0.1:9")


@pytest.mark.parametrize("server", ["drip"], indirect=True)
def test_openenv_server_that_answers_byte_by_byte_is_refused_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "START_TIMEOUT_S", 0.3)
    with refused("remote", "environment", "/schema"):
        played(server.url)
    assert server.num_bytes < 100
