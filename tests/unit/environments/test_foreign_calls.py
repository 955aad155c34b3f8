"""What environments do that they should not: it costs their episode, and no other."""

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from open_instruct.core.errors import RunError
from open_instruct.environments.built_in import Calculator
from open_instruct.environments.environment import (
    DedicatedLoop,
    Opening,
    Reply,
    Source,
    ToolAnswer,
    Turn,
)
from open_instruct.environments.foreign_calls import (
    MAX_ERROR_CHARACTERS,
    call_foreign,
    describe_error,
)
from open_instruct.environments.loop_watch import LoopWatch
from open_instruct.rewards.event_loop import start_loop
from open_instruct.rl.episodes import conversations as conversations_module
from open_instruct.rl.episodes.foreign_texts import (
    SLACK_TOKENS,
    USUAL_CHARACTERS_PER_TOKEN,
    PlainTokenizer,
)
from open_instruct.rl.episodes.trace_text import MAX_TRACE_CHARACTERS
from tests.unit.environments.test_environments import CALL, Asked, ask, tokenizer  # noqa: F401  # fixtures
from tests.unit.fake_engine import eventually

WALK = '<tool_call>{"name": "walk", "arguments": {}}</tool_call><|im_end|>'
CONTROL_FLOW = [
    asyncio.CancelledError,
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    SystemExit,
    concurrent.futures.CancelledError,
]


def raising(error: type[BaseException], place: str) -> Callable[[], Any]:
    """A factory of environments that raise in one place."""

    class AsyncTool:
        async def walk(self) -> str:
            """Walks."""
            raise error("odd")

    class Tool:
        def walk(self) -> str:
            """Walks."""
            raise error("odd")

    class Steps:
        async def start(self) -> Opening:
            return Opening()

        async def step(self, reply: Reply) -> Turn:
            raise error("odd")

        async def close(self) -> None:
            raise error("odd")

    class Starts(Steps):
        async def start(self) -> Opening:
            raise error("odd")

    def make() -> Any:
        raise error("odd")

    places: dict[str, Callable[[], Any]] = {
        "async tool": AsyncTool,
        "tool": Tool,
        "step": Steps,
        "start": Starts,
        "factory": make,
    }
    return places[place]


@pytest.mark.parametrize("place", ["async tool", "tool", "step", "start", "factory"])
@pytest.mark.parametrize("error", CONTROL_FLOW)
def test_what_steers_a_loop_is_the_error_of_its_episode_alone(
    ask: Callable[..., Asked],  # noqa: F811
    error: type[BaseException],
    place: str,
) -> None:
    completion, _ = ask(raising(error, place), [WALK], environment_timeout_s=20)
    assert completion.episode is not None and completion.episode.status == "env_error"
    assert error.__name__ in completion.episode.problem


@pytest.mark.parametrize("error", [TimeoutError, RunError])
def test_errors_that_are_named_as_ours_are_the_environments_own(
    ask: Callable[..., Asked],  # noqa: F811
    error: type[BaseException],
) -> None:
    """No time-out of ours has passed, and no engine is lost."""
    completion, _ = ask(raising(error, "step"), ["x<|im_end|>"], environment_timeout_s=20)
    assert completion.episode is not None and completion.episode.status == "env_error"
    assert error.__name__ in completion.episode.problem


def test_task_that_a_tool_cancels_is_that_tools_own(ask: Callable[..., Asked]) -> None:  # noqa: F811
    class Cancels:
        async def start(self) -> Opening:
            return Opening()

        async def step(self, reply: Reply) -> Turn:
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(0)
            return Turn(done=True)

        async def close(self) -> None: ...

    completion, _ = ask(Cancels, ["x<|im_end|>"], environment_timeout_s=20)
    assert completion.episode is not None and completion.episode.status == "env_error"
    assert "CancelledError" in completion.episode.problem


def test_our_own_cancellation_reaches_foreign_code() -> None:
    began, was_cancelled = threading.Event(), threading.Event()

    async def wait_forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async def give_up() -> None:
        task = asyncio.create_task(call_foreign(wait_forever))
        while not began.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(give_up())
    assert was_cancelled.wait(20.0)


def test_error_is_described_however_odd_its_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("nothing to say")

    assert describe_error(Mute()) == "Mute"
    assert len(describe_error(ValueError("x" * 10**6))) < MAX_ERROR_CHARACTERS + 100


def test_blocked_loop_is_named_while_others_end(
    ask: Callable[..., Asked],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations_module, "CLOSE_TIMEOUT_S", 0.05)
    gate = threading.Event()
    warnings: list[str] = []

    class Blocks:
        async def start(self) -> Opening:
            return Opening()

        async def step(self, reply: Reply) -> Turn:
            gate.wait()  # in place of time.sleep
            return Turn(done=True)

        async def close(self) -> None: ...

    try:
        with ThreadPoolExecutor(1) as thread:
            watch = {"warn": warnings.append, "blocked_limit_s": 0.05}
            late = thread.submit(ask, Blocks, ["x<|im_end|>"], watch=watch)
            eventually(lambda: warnings)
            completion, _ = ask(Calculator, [f"{CALL}<|im_end|>"], environment_timeout_s=20)
            assert completion.episode is not None and completion.episode.status == "done"
            blocked, _ = late.result(20.0)
    finally:
        gate.set()
    assert "Blocks.step (test_foreign_calls.py:" in warnings[0]
    assert blocked.episode is not None and blocked.episode.status == "timeout"
    assert "Blocks.step (test_foreign_calls.py:" in blocked.episode.problem


def test_blocked_loop_of_one_environment_is_named_with_it(
    ask: Callable[..., Asked],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that has a loop of its own calls what its user wrote there."""
    monkeypatch.setattr(conversations_module, "CLOSE_TIMEOUT_S", 0.05)
    gate = threading.Event()
    warnings: list[str] = []
    library: dict[str, Any] = {"__name__": "judging.rubric"}
    exec("async def judge(reward):\n    return reward()", library)

    def reward() -> None:
        gate.wait()  # in place of time.sleep

    class Judging(Source):
        dedicated_loop = DedicatedLoop(name="a loop of judging", package="judging")

        def begin_run(self) -> None: ...

        def __call__(self) -> Any:
            return Episode()

    class Episode:
        async def start(self) -> Opening:
            return Opening()

        async def step(self, reply: Reply) -> Turn:
            loop = start_loop("a loop of judging")
            work = asyncio.run_coroutine_threadsafe(library["judge"](reward), loop)
            await asyncio.wrap_future(work)
            return Turn(done=True)

        async def close(self) -> None: ...

    try:
        watch = {"warn": warnings.append, "blocked_limit_s": 0.05}
        blocked, _ = ask(Judging(), ["x<|im_end|>"], watch=watch)
        completion, _ = ask(Calculator, [f"{CALL}<|im_end|>"], environment_timeout_s=20)
    finally:
        gate.set()
    (warning,) = warnings
    assert "reward (test_foreign_calls.py:" in warning and "event loop of it " in warning
    assert blocked.episode is not None and blocked.episode.status == "timeout"
    assert "event loop of it is blocked by" in blocked.episode.problem
    assert "reward (test_foreign_calls.py:" in blocked.episode.problem
    assert completion.episode is not None and completion.episode.status == "done"


def test_environment_that_is_merely_late_blocks_nothing(ask: Callable[..., Asked]) -> None:  # noqa: F811
    class Waits:
        async def start(self) -> Opening:
            return Opening()

        async def step(self, reply: Reply) -> Turn:
            await asyncio.sleep(3600)
            return Turn(done=True)

        async def close(self) -> None: ...

    completion, _ = ask(Waits, ["x<|im_end|>"], environment_timeout_s=0.05)
    assert completion.episode is not None and completion.episode.status == "timeout"
    assert "block" not in completion.episode.problem


def test_watch_names_what_blocks_a_loop_until_it_goes_on() -> None:
    loop = start_loop("watched by a test")
    warnings: list[str] = []
    watch = LoopWatch(
        loop, thread_name="watched by a test", warn=warnings.append, limit_s=0.01, interval_s=0.01
    )
    gate = threading.Event()

    async def hold() -> None:
        threading.Event.wait(gate)

    blocked = asyncio.run_coroutine_threadsafe(hold(), loop)
    eventually(lambda: "hold (test_foreign_calls.py:" in watch.blocker)
    gate.set()
    blocked.result(20.0)
    eventually(lambda: not watch.blocker)
    watch.close()
    assert len(warnings) == 1, "one function is named once"


class TestRewards:
    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1e16, 10**400])
    @pytest.mark.parametrize("place", ["game", "tool", "reward", "turn"])
    def test_reward_that_is_not_finite_is_the_error_of_its_episode(
        self,
        ask: Callable[..., Asked],  # noqa: F811
        place: str,
        reward: float,
    ) -> None:
        class Game:
            def reset(self) -> str:
                return "go"

            def step(self, text: str) -> Any:
                return "on", reward, False, {}

        class Tool:
            def walk(self) -> ToolAnswer:
                """Walks."""
                return ToolAnswer(content="on", reward=reward)

        class Judges:
            def walk(self) -> str:
                """Walks."""
                return "on"

            def reward(self) -> float:
                return reward

        class Own:
            async def start(self) -> Opening:
                return Opening()

            async def step(self, reply: Reply) -> Turn:
                return Turn(rewards={"fine": 0.5, "odd": reward})

            async def close(self) -> None: ...

        made = {"game": Game, "tool": Tool, "reward": Judges, "turn": Own}[place]
        text = WALK if place == "tool" else "x<|im_end|>"
        completion, _ = ask(made, [text], environment_timeout_s=20)
        assert completion.episode is not None and completion.episode.status == "env_error"
        assert "not finite" in completion.episode.problem
        assert all(map(math.isfinite, completion.episode.rewards.values()))

    def test_sum_of_rewards_may_not_be_too_large_either(self, ask: Callable[..., Asked]) -> None:  # noqa: F811
        class Game:
            def reset(self) -> str:
                return "go"

            def step(self, text: str) -> Any:
                return "on", 6e14, False, {}

        texts = ["x<|im_end|>"] * 3
        completion, _ = ask(Game, texts, reward_aggregator="sum", environment_timeout_s=20)
        assert completion.episode is not None and completion.episode.status == "env_error"
        assert completion.episode.rewards == {"game": 6e14}


class TestHugeTexts:
    @pytest.fixture
    def encoded_lengths(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Of each foreign text that is tokenised, its characters."""
        lengths: list[int] = []
        encode = PlainTokenizer.encode

        def counted(plain: PlainTokenizer, text: str) -> list[int]:
            lengths.append(len(text))
            return encode(plain, text)

        monkeypatch.setattr(PlainTokenizer, "encode", counted)
        return lengths

    @pytest.mark.parametrize("text", ["x", " the", "\n", "日", "<|im_end|>"])
    def test_answer_that_cannot_fit_ends_the_episode_before_it_is_tokenised(
        self,
        ask: Callable[..., Asked],  # noqa: F811
        encoded_lengths: list[int],
        text: str,
    ) -> None:
        class Floods:
            async def walk(self) -> str:
                """Walks."""
                return text * 10**6

        completion, requests = ask(Floods, [WALK] * 9, environment_timeout_s=20)
        assert completion.episode is not None and completion.episode.status == "length"
        assert len(requests) == 1 and completion.replies[-1].stop == len(completion.token_ids)
        most = USUAL_CHARACTERS_PER_TOKEN * (400 + SLACK_TOKENS)
        assert sum(encoded_lengths) <= most
        shown = completion.episode.turns[-1]["content"]
        assert len(shown) < MAX_TRACE_CHARACTERS + 100
        assert (
            shown.startswith(text) and shown.endswith(text) and "characters are left out" in shown
        )

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_first_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
        self,
        ask: Callable[..., Asked],  # noqa: F811
        encoded_lengths: list[int],
        is_whole: bool,
    ) -> None:
        class Floods:
            def reset(self) -> str:
                return "the yes " * 10**6

            def step(self, text: str) -> Any:
                raise AssertionError("it never begins")

        class FloodsWhole:
            async def start(self) -> Opening:
                return Opening(messages=[{"role": "user", "content": "the yes " * 10**6}])

            async def step(self, reply: Reply) -> Turn:
                raise AssertionError("it never begins")

            async def close(self) -> None: ...

        completion, requests = ask(
            FloodsWhole if is_whole else Floods, [], environment_timeout_s=20
        )
        assert completion.episode is not None and completion.episode.status == "env_error"
        assert "--max_prompt_token_length 2000" in completion.episode.problem
        assert not requests and completion.token_ids == () == completion.episode.prompt_token_ids
        assert sum(encoded_lengths) <= USUAL_CHARACTERS_PER_TOKEN * (2000 + SLACK_TOKENS)
        assert sum(len(turn["content"]) for turn in completion.episode.turns) < 21_000

    def test_answer_that_fits_is_whole(self, ask: Callable[..., Asked]) -> None:  # noqa: F811
        class Tells:
            def walk(self) -> str:
                """Walks."""
                return "yes " * 20

        completion, _ = ask(Tells, [WALK, "done<|im_end|>"], environment_timeout_s=20)
        assert completion.episode is not None and completion.episode.status == "done"
        assert completion.episode.turns[-2]["content"] == "yes " * 20
