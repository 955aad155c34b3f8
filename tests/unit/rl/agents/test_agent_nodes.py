"""Agents on several nodes, each of which stands in this process; real ones are in the fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.environments import agent_walls
from open_instruct.generation.engine_pool import RequestRefused
from open_instruct.generation.requests import GenerationRequest, Home, SamplingSettings
from open_instruct.rl.agents.node import AgentNode
from open_instruct.rl.agents.nodes import AgentNodes
from tests.refusals import refused
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.environments.test_environments import Engines
from tests.unit.fake_rollouts import grpo_config
from tests.unit.rl.agents.test_agent_episodes import CLIENT, USER
from tests.waiting import eventually

BODY = """
import time

def solve(messages, name):
    answer = chat([*messages, {"role": "user", "content": name}])
    if "choices" not in answer:
        return -float(answer["status"])
    while os.path.exists(name):
        time.sleep(0.05)
    return float(answer["choices"][0]["message"]["content"])
"""


class LocalNode:
    """A node's process as its driver asks it, until it is killed."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.num_begun = 0
        self.is_dead = False
        self._node = AgentNode(**arguments)

    def wait_ready(self, timeout_s: float) -> None:
        """It is constructed."""

    def ask(self, timeout_s: float, method: Any, *args: Any) -> Any:
        if self.is_dead:
            raise RunError("agents 0 was lost")
        return method(self._node, *args)

    def tell(self, method: Any, *args: Any) -> None:
        self.num_begun += method is AgentNode.begin
        if not self.is_dead:
            method(self._node, *args)

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._node.shutdown()


class HomedEngines(Engines):
    """Engines of which the second answers, and refuses what it is told to."""

    refuses = False

    def submit(self, request: GenerationRequest, home: Any = None) -> Future[Completion]:
        if self.refuses:
            future: Future[Completion] = Future()
            future.set_exception(RequestRefused("not so"))
            return future
        assert isinstance(home, Home)
        home.engine = 1
        self.last_future = super().submit(request, home)
        return self.last_future


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = ChatFormat.choose(tokenizer, "chatml").template.text
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.py").write_text(CLIENT + BODY)
    config = grpo_config("--max_prompt_token_length", "500", "--response_length", "100")
    config.environment = EnvironmentSection(max_turns=4, environment_timeout_s=60.0)
    started: list[AgentNodes] = []

    def start(
        *, max_restarts: int = 1, working_folder: str = "", agent_sandbox: bool = False
    ) -> Any:
        config.environment.agent_sandbox = agent_sandbox
        name = f"agent:{tmp_path / 'mine.py'}:solve"
        engines = HomedEngines(tokenizer, ["7<|im_end|>"] * 99)
        handles: list[LocalNode] = []
        said: list[str] = []

        def start_node(index: int) -> Any:
            handles.append(
                LocalNode(
                    {
                        "config": config,
                        "tokenizer_folder": str(tmp_path / "tokenizer"),
                        "names": (name,),
                        "working_folder": working_folder or os.getcwd(),
                    }
                )
            )
            return handles[-1]

        pool: Any = engines
        nodes = AgentNodes(
            pool,
            2,
            start_node=start_node,
            timeout_s=60.0,
            max_restarts=max_restarts,
            say=said.append,
        )
        started.append(nodes)

        def ask(word: str) -> Future[Completion]:
            row = {"messages": [USER], "name": word}
            prompt = Prompt(
                row_id=0,
                token_ids=(1, 2),
                text="",
                checks=(),
                environment=name,
                row=row,
            )
            sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=100)
            request = GenerationRequest(
                request_id=word, prompt_token_ids=(1, 2), seed=17, sampling=sampling
            )
            return nodes.ask(prompt, request)

        return ask, handles, engines, said

    yield start
    for nodes in started:
        nodes.close()


def test_episodes_are_shared_over_nodes_and_come_back_with_their_ids(
    start: Callable[..., Any],
) -> None:
    ask, handles, engines, _ = start()
    completions = [future.result(60) for future in [ask("Four?") for _ in range(4)]]
    assert [handle.num_begun for handle in handles] == [2, 2]
    first = completions[0]
    assert first.episode.rewards == {"agent": 7.0} and first.episode.status == "done"
    assert all(each == first for each in completions)
    assert {request.prompt_token_ids for request in engines.requests} == {
        first.episode.prompt_token_ids
    }
    engines.refuses = True
    assert ask("Five?").result(60).episode.rewards == {"agent": -400.0}


def test_node_that_dies_is_started_again_with_its_episodes(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    ask, handles, engines, said = start()
    until = tmp_path / "until"
    until.touch()
    futures = [ask(str(until)) for _ in range(2)]
    eventually(lambda: len(engines.requests) == 2, what="they did not ask")
    assert not any(future.done() for future in futures)
    handles[0].kill()
    eventually(lambda: len(engines.requests) == 3, what="no episode began again")
    until.unlink()
    assert [future.result(60).episode.status for future in futures] == ["done", "done"]
    first, _, again = engines.requests
    assert (again.seed, again.prompt_token_ids) == (first.seed, first.prompt_token_ids)
    assert len(handles) == 3 and len(said) == 1

    until.touch()
    lost = ask(str(until))
    handles[2].kill()
    with pytest.raises(RunError, match="max_restarts"):
        lost.result(60)
    with pytest.raises(RunError, match="max_restarts"):
        ask("Late?").result(60)


def test_episode_that_is_given_up_leaves_nothing(start: Callable[..., Any], tmp_path: Path) -> None:
    ask, _, engines, _ = start()
    engines._texts.insert(0, None)
    future = ask("Never?")
    eventually(lambda: engines.requests, what="it did not ask")
    future.cancel()
    eventually(engines.last_future.cancelled, what="its request goes on")
    assert ask("Now?").result(60).episode.status == "done"


def test_node_without_the_working_folder_or_walls_is_refused(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("missing_file"):
        start(working_folder=str(tmp_path / "elsewhere"))
    monkeypatch.setattr(agent_walls, "find_missing_wall", lambda: "Landlock")
    with refused("machine", flag="agent_sandbox"):
        start(agent_sandbox=True)
