"""Environments of the package `verifiers`, against its own loop with the same replies."""

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.core.errors import InputError
from open_instruct.data.prompt_environments import find_environment
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.environment import EnvironmentFault, Reply, ToolCall, begin_run
from open_instruct.environments.registry import known_environments
from open_instruct.rl.episodes import conversations as conversations_module
from tests.unit.environments.test_environments import (  # noqa: F401  # fixtures
    Asked,
    ask,
    blocks_of_the_page,
    tokenizer,
)

verifiers = pytest.importorskip("verifiers", reason="pip install 'open-instruct[verifiers]'")

TASKSETS = '''
import threading

import verifiers
from datasets import Dataset


class Higher(verifiers.MultiTurnEnv):
    """Says whether a guess is too low, and has a last word."""

    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1]["content"]
        if guess == "rewrite":
            messages[0]["content"] = "Something else."
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Higher." if guess < state["answer"] else "Lower."}]

    @verifiers.cleanup
    async def let_go(self, state):
        state.get("info", {}).get("let_go", []).append(state["answer"])


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def is_right(completion, answer):
    return float(completion[-1]["content"] == answer)


def turns(state):
    return 0.25 * len(state["trajectory"])


def ended_well(completion):
    return float(completion[-1]["content"] == "Right.")


def exits(completion):
    raise SystemExit(3)


def waits(completion):
    GATE.wait()  # in place of time.sleep
    return 1.0


def compared(completions):
    return [0.0 for _ in completions]


GATE = threading.Event()
ROWS = Dataset.from_list([{"question": "How many?", "answer": "5"}])


def load_environment(kind="higher", max_turns=4):
    if kind == "higher":
        rubric = verifiers.Rubric([ended_well, turns], weights=[1.0, 0.5])
        return Higher(dataset=ROWS, rubric=rubric, max_turns=max_turns)
    if kind == "tools":
        return verifiers.ToolEnv(tools=[add], dataset=ROWS, rubric=verifiers.Rubric([is_right]))
    if kind == "group":
        members = [load_environment("single"), load_environment("higher")]
        return verifiers.EnvGroup(members, env_names=["single", "higher"])
    if kind == "completion":
        rows = Dataset.from_list([{"prompt": "How many?", "answer": "5"}])
        return verifiers.SingleTurnEnv(dataset=rows, rubric=verifiers.Rubric([is_right]), message_type="completion")
    rewards = {"compared": [compared], "exits": [exits], "waits": [waits]}.get(kind, [is_right])
    return verifiers.SingleTurnEnv(dataset=ROWS, rubric=verifiers.Rubric(rewards))
'''
ADD = Reply(text="I add.", calls=(ToolCall(name="add", arguments={"a": 2, "b": 3}),))
WRONG = Reply(text="I add.", calls=(ToolCall(name="add", arguments={"c": 2}),))


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tasks_of_the_test.py").write_text(TASKSETS)
    monkeypatch.syspath_prepend(tmp_path)
    return "verifiers:tasks-of-the-test"


def row(**more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "How many?"}]
    return {"messages": turns, "answer": "5", "info": {"let_go": []}, **more}


def played(
    word: str, replies: list[Reply], columns: dict[str, Any]
) -> tuple[list[dict[str, Any]], float | None]:
    """The turns of an episode, and its reward if it has come to its end."""
    factory = known_environments(EnvironmentSection(environment=word))[word]
    begin_run(factory)

    async def play() -> tuple[list[dict[str, Any]], float | None]:
        environment = make_environment(factory, columns)
        try:
            opening = await environment.start()
            said: list[dict[str, Any]] = [dict(turn) for turn in opening.messages or ()]
            for reply in replies:
                turn = await environment.step(reply)
                said += [{"role": "assistant", "content": reply.text}, *map(dict, turn.messages)]
                if turn.done:
                    return said, sum(turn.rewards.values())
            return said, None
        finally:
            await environment.close()

    return asyncio.run(play())


def by_its_own_loop(
    settings: dict[str, Any], replies: list[Reply], columns: dict[str, Any]
) -> tuple[Any, float]:
    """The same by the library, whose model says the replies."""
    from openai.types.chat import ChatCompletion

    left = iter(replies)

    async def create(**_: Any) -> ChatCompletion:
        reply = next(left)
        calls = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
            }
            for i, c in enumerate(reply.calls)
        ]
        message = {
            "role": "assistant",
            "content": reply.text,
            **({"tool_calls": calls} if calls else {}),
        }
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        form = {
            "id": "",
            "created": 0,
            "model": "m",
            "object": "chat.completion",
            "choices": [choice],
        }
        return ChatCompletion.model_validate(form)

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    taskset = verifiers.load_environment("tasks-of-the-test", **settings)
    given = {"example_id": 0, "task": "default", **columns, "prompt": columns["messages"]}
    state = asyncio.run(
        taskset.run_rollout(given, client, "m", {}, nullcontext(), nullcontext(), score=True)
    )
    turns = [*state["prompt"], *state["completion"]]
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns], state["reward"]


CASES = [
    ({"kind": "single"}, [Reply(text="5")]),
    ({"kind": "single"}, [Reply(text="6")]),
    ({"kind": "tools"}, [ADD, Reply(text="5")]),
    ({"kind": "tools"}, [WRONG, ADD, Reply(text="6")]),
    ({"kind": "higher"}, [Reply(text="3"), Reply(text="7"), Reply(text="5")]),
    ({"kind": "higher", "max_turns": 2}, [Reply(text="3"), Reply(text="4")]),
]


@pytest.mark.parametrize(("settings", "replies"), CASES)
def test_episode_is_the_rollout_of_the_library(
    name: str, settings: dict[str, Any], replies: list[Reply]
) -> None:
    turns, reward = played(f"{name}:{json.dumps(settings)}", replies, row())
    expected, expected_reward = by_its_own_loop(settings, replies, row())
    assert reward == expected_reward
    assert turns == expected[: len(turns)], "but for a last word that no reply follows"
    assert len(expected) - len(turns) == (replies[-1].text == "5" and settings["kind"] == "higher")


def test_page_makes_prompts_of_its_rows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks_of_the_page() if block.startswith("# rows.py"))
    exec(compile(block.replace('"NAME"', '"tasks-of-the-test"'), "rows.py", "exec"), {})
    columns = json.loads(capsys.readouterr().out)
    answered_by = find_environment(columns, default=name, environments=[name])
    assert (
        answered_by is not None
        and played(name, [Reply(text="5")], {**columns, **answered_by.columns})[1] == 1.125
    )


def test_group_of_tasksets_is_played_by_the_row_s_task(name: str) -> None:
    word = f'{name}:{{"kind": "group"}}'
    assert played(word, [Reply(text="5")], row(task="single"))[1] == 1.0
    assert played(word, [Reply(text="3")], row(task="higher"))[0][-1]["content"] == "Higher."


def test_episode_that_is_cut_lets_go_of_what_it_holds(name: str) -> None:
    columns = row()
    held: list[str] = []
    columns["info"] = Held(let_go=held)
    assert played(name, [Reply(text="3")], columns)[1] is None and held == ["5"]
    assert played(name, [Reply(text="5")], columns)[1] is not None and held == ["5", "5"], "once"


class Held(dict[str, Any]):
    """Is not copied with the row, so that the test sees what is done with it."""

    def __deepcopy__(self, memo: Any) -> "Held":
        return self


def test_turns_that_are_rewritten_are_refused(name: str) -> None:
    with pytest.raises(Exception, match="Higher changes turns that have been"):
        played(name, [Reply(text="rewrite")], row())


def test_rewards_that_compare_completions_are_a_fault_that_says_so(name: str) -> None:
    with pytest.raises(AssertionError, match="no group-level reward functions"):
        played(f'{name}:{{"kind": "compared"}}', [Reply(text="5")], row())


def test_reward_that_exits_does_so_for_its_own_episode_alone(name: str) -> None:
    with pytest.raises(EnvironmentFault, match="SystemExit"):
        played(f'{name}:{{"kind": "exits"}}', [Reply(text="5")], row())
    assert played(f'{name}:{{"kind": "single"}}', [Reply(text="5")], row())[1] == 1.0


def test_reward_that_blocks_the_loop_of_its_taskset_is_named(
    name: str,
    ask: Callable[..., Asked],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations_module, "CLOSE_TIMEOUT_S", 0.05)
    word = f'{name}:{{"kind": "waits"}}'
    factory = known_environments(EnvironmentSection(environment=word))[word]
    begin_run(factory)
    import tasks_of_the_test  # type: ignore[import-not-found]

    warnings: list[str] = []
    watch = {"warn": warnings.append, "blocked_limit_s": 0.05}
    try:
        completion, _ = ask(factory, ["x<|im_end|>"], watch=watch)
    finally:
        tasks_of_the_test.GATE.set()
    (warning,) = warnings
    assert "waits (tasks_of_the_test.py:" in warning and "event loop of it " in warning
    assert completion.episode is not None and completion.episode.status == "timeout"
    assert "waits (tasks_of_the_test.py:" in completion.episode.problem


def test_ctrl_c_stays_with_the_run(name: str) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    played(name, [], row())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("verifiers:nobody-has-this", "nobody-has-this cannot be loaded: Could not import"),
        ('verifiers:tasks-of-the-test:{"kind": ', "cannot be loaded"),
        ('verifiers:tasks-of-the-test:{"size": 3}', "unexpected keyword argument 'size'"),
        (
            'verifiers:tasks-of-the-test:{"kind": "completion"}',
            "SingleTurnEnv is none of turns of chat",
        ),
    ],
)
def test_taskset_that_cannot_be_played_is_refused(name: str, word: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        played(word, [], row())
