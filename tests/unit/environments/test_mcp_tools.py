"""Tools of a real MCP server, over its stdin and stdout and over HTTP, as an environment."""

import asyncio
import importlib.util
import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.core.errors import InputError
from open_instruct.environments import mcp_tools
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.environment import EnvironmentFault, Reply, begin_run
from open_instruct.environments.mcp_tools import McpServer
from open_instruct.environments.registry import find_factory, known_environments
from open_instruct.grpo_olmo_core_actor import preflight
from open_instruct.rl.checked_run import open_rollout_run
from tests.ranks.train_case import free_ports
from tests.unit.environments.test_environments import USER, Asked, ask, calls, decoded, tokenizer  # noqa: F401  # fixtures

# A program that imports the library of servers is at work for three seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp comes with vLLM"),
]

SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")
NUM_CALLS = 0

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Adds two numbers."
    global NUM_CALLS
    NUM_CALLS += 1
    return a + b

@server.tool()
def num_calls() -> str:
    "Says how often numbers were added."
    return f"{NUM_CALLS} in {os.getpid()}"

@server.tool()
async def hang() -> str:
    "Never answers."
    import asyncio
    await asyncio.Event().wait()

@server.tool()
def die() -> str:
    "Ends the server."
    os._exit(3)

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
"""
START_S = 60


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("server") / "sums.py"
    file.write_text(SERVER)
    return shlex.join([sys.executable, str(file)])


@pytest.fixture
def address(program: str) -> Iterator[str]:
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [*shlex.split(program), "streamable-http", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                McpServer(f"http://127.0.0.1:{port}/mcp", origin="").begin_run()
                break
            except InputError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait(10)


def said(factory: Any, *replies: Reply, **row: Any) -> list[Any]:
    """What the tools answer, each reply in an episode of its own; an exception where one raises."""

    begin_run(factory)

    async def play() -> list[Any]:
        answers: list[Any] = []
        for reply in replies:
            environment = make_environment(factory, {"messages": [USER], **row})
            await environment.start()
            try:
                turn = await asyncio.wait_for(environment.step(reply), START_S)
                answers.append(
                    [message["content"] for message in turn.messages] if not turn.done else "done"
                )
            except Exception as error:
                answers.append(error)
            await environment.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # as at the end of a run
        for task in tasks:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), START_S)
        return answers

    return asyncio.run(play())


def check_sums(factory: Any) -> None:
    first, wrong, none, count, again = said(
        factory,
        calls("add", a=2, b=3),
        calls("add", a="x"),
        Reply(text="It is 5."),
        calls("num_calls"),
        calls("num_calls"),
    )
    assert first == ["5"] and none == "done"
    assert "a" in wrong[0] and "int" in wrong[0], "the policy is told of its mistake"
    assert count == again and count[0].startswith("1 in "), "one session serves all episodes"


@pytest.mark.extended
def test_tools_of_a_program(program: str) -> None:
    factory = known_environments(EnvironmentSection(environment=f"mcp:{program} stdio"))[
        f"mcp:{program} stdio"
    ]
    check_sums(factory)
    opening = asyncio.run(make_environment(factory, {"messages": [USER], "tools": ["add"]}).start())
    (tool,) = opening.tools
    assert tool["type"] == "function" and tool["function"]["description"] == "Adds two numbers."
    assert tool["function"]["parameters"]["properties"].keys() == {"a", "b"}


def of_settings(program: str, **settings: Any) -> str:
    command, *args = shlex.split(program)
    return json.dumps(
        {"transport": "stdio", "command": command, "args": [*args, "stdio"], **settings}
    )


def test_tool_of_a_server_works_beside_others(program: str) -> None:
    section = EnvironmentSection(
        tools=["calculator", "generic_mcp"],
        tool_call_names=["calculate", "plus"],
        tool_configs=["{}", of_settings(program, tool_name="add")],
    )
    factory = known_environments(section)["tools"]
    assert said(factory, calls("calculate", expression="1+1"), calls("plus", a=2)) == [["2"], ["3"]]
    opening = asyncio.run(make_environment(factory, {"messages": [USER]}).start())
    assert [each["function"]["name"] for each in opening.tools] == ["calculate", "plus"]


@pytest.mark.extended
def test_call_that_is_late_leaves_the_session_to_others(program: str) -> None:
    section = EnvironmentSection(
        tools=["generic_mcp"], tool_configs=[of_settings(program, timeout=2.0)]
    )
    first, late, count = said(
        known_environments(section)["tools"], calls("add", a=1), calls("hang"), calls("num_calls")
    )
    assert first == ["2"] and isinstance(late, EnvironmentFault) and "TimeoutError" in str(late)
    assert count[0].startswith("1 in ")


@pytest.fixture
def stray_lines() -> Iterator[mcp_tools._StrayLineFilter]:
    """Of a process that has not warned yet."""
    logger = logging.getLogger("mcp.client.stdio")
    before = logger.filters
    logger.filters = [mcp_tools._StrayLineFilter()]
    yield logger.filters[0]
    logger.filters = before


@pytest.mark.extended
def test_traceback_of_a_stray_line_is_one_warning(
    stray_lines: mcp_tools._StrayLineFilter, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("mcp.client.stdio")
    for line in ("Working...", "Done."):
        try:
            json.loads(line)
        except ValueError:
            logger.exception("Failed to parse JSONRPC message from server")
    logger.warning("a process is left")
    first, other = caplog.records
    assert (
        first.levelno == logging.WARNING
        and first.exc_info is None
        and "stdout" in first.getMessage()
    )
    assert other.getMessage() == "a process is left"


@pytest.mark.extended
def test_server_that_writes_stray_lines_answers_with_one_warning(
    program: str, stray_lines: mcp_tools._StrayLineFilter, caplog: pytest.LogCaptureFixture
) -> None:
    noisy = shlex.join(["sh", "-c", f"echo Working...; echo Still.; exec {program} stdio"])
    assert said(find_factory(f"mcp:{noisy}", origin=""), calls("add", a=1)) == [["2"]]
    (record,) = [each for each in caplog.records if each.name == "mcp.client.stdio"]
    assert record.exc_info is None and "stdout" in record.getMessage()


@pytest.mark.extended
def test_tools_at_an_address(address: str) -> None:
    check_sums(find_factory(f"mcp:{address}", origin="--environment"))


@pytest.mark.extended
def test_run_starts_it_once_for_its_tools(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the flags needs its name alone, which is refused if it is none."""
    tiny = write_tiny_model(tmp_path / "tiny", family="olmo2")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1 + 1"}]}\n')
    words = (
        f"--model_name_or_path {tiny} --dataset_mixer_list {rows} 1.0 --output_dir "
        f"{tmp_path / 'out'}"
    ).split()
    words += ["--cache_dir", str(tmp_path / "cache"), "--no_plan_check"]
    config = parse_run(GRPOConfig, [*words, "--environment", f"mcp:{program} stdio"])
    listed = list[str]()
    of_server = McpServer._list_tools
    monkeypatch.setattr(
        McpServer, "_list_tools", lambda self: listed.append(self._where) or of_server(self)
    )
    preflight(config)
    with open_rollout_run(config) as run:
        assert run.environments is not None and listed == [f"{program} stdio"]


@pytest.mark.extended
def test_server_that_dies_costs_its_episode_and_is_started_anew(program: str) -> None:
    lost, after, count = said(
        find_factory(f"mcp:{program} stdio", origin=""),
        calls("die"),
        calls("add", a=1),
        calls("num_calls"),
    )
    assert isinstance(lost, Exception) and "Connection closed" in str(lost)
    assert after == ["2"] and count[0].startswith("1 in ")


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("/no/such/program", "FileNotFoundError"),
        ("false", "Connection closed"),
        ("", "no MCP server answers"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
def test_server_that_is_not_there_is_refused(where: str, told: str) -> None:
    with pytest.raises(
        InputError, match=rf"--environment mcp:.*no MCP server answers.*{told}" if where else told
    ):
        begin_run(find_factory(f"mcp:{where}", origin=f"--environment mcp:{where}"))


def test_episode_calls_them_and_a_lost_server_is_no_fault_of_the_policy(
    ask: Any,  # noqa: F811
    tokenizer: Any,  # noqa: F811
    program: str,
) -> None:
    factory = find_factory(f"mcp:{program} stdio", origin="")
    begin_run(factory)
    call = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call><|im_end|>'
    completion, requests = ask(
        factory, [call % ("add", '"a": 2'), "It is 3.<|im_end|>"], environment_timeout_s=60
    )
    assert completion.episode.status == "done" and len(completion.replies) == 2
    assert "Adds two numbers." in decoded(tokenizer, requests[0].prompt_token_ids)
    assert decoded(tokenizer, requests[1].prompt_token_ids).endswith(
        "tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    # A session serves one thread of episodes.
    another = find_factory(f"mcp:{program} stdio", origin="")
    begin_run(another)
    completion, _ = ask(another, [call % ("die", "")], environment_timeout_s=60)
    assert (
        completion.episode.status == "env_error"
        and "Connection closed" in completion.episode.problem
    )
