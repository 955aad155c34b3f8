"""Episodes in environments that take their time: what an engine loses by them, and what becomes of
those that fail.

    python benchmarks/episodes.py [--num_episodes 400] [--at_once 200] [--num_rounds 3]

A tiny model's engine, the pool of engines and the walk of episodes are those of a run, in one
process. Each episode has three replies of 24 tokens, and its environment takes 50 ms to answer
each. Then the engine is given the same requests by themselves, all at once: "own". Both are counted
in tokens for a second of the engine's CPU, since the wall clock of two cores tells more of the
neighbours. Prompts are not kept in memory, which would make the second of the two quicker.

Last, a tenth of the environments hang and a twentieth raise: every episode must come back, each
that hung within its time.

CPUs only. The exit code is 1 if the ratio is under 0.9, or an episode is lost or late.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from harness.episode_speeds import compare_speeds, prepare_engine
from harness.program import end

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.core.records import Completion, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.environments.environment import Opening, Reply, Turn
from open_instruct.generation.requests import (
    Batching,
    EngineSettings,
    GenerationRequest,
    Home,
    SamplingSettings,
)
from open_instruct.rl.episodes.conversations import Conversations
from open_instruct.rl.episodes.walk import build_requests

if TYPE_CHECKING:
    from open_instruct.generation.engine import Engine

NUM_TURNS, REPLY_TOKENS, MAX_TOKENS = 3, 24, 400
ANSWER_S, TIMEOUT_S, LATE_S = 0.05, 2.0, 1.0
WANTED_RATIO = 0.9
QUESTION = {"role": "user", "content": "What now?"}


class Slow:
    """Takes `ANSWER_S` to answer; by its row it hangs, or raises, at the second reply."""

    hung_s: dict[int, float] = {}  # noqa: RUF012  # by row, when it began to hang

    def __init__(self, number: int, fails: str) -> None:
        self._number = number
        self._fails = fails
        self._num_replies = 0

    async def start(self) -> Opening:
        return Opening()

    async def step(self, reply: Reply) -> Turn:
        import asyncio

        self._num_replies += 1
        if self._num_replies == 2 and self._fails == "raises":
            raise RuntimeError("the environment is broken")
        if self._num_replies == 2 and self._fails == "hangs":
            Slow.hung_s[self._number] = time.monotonic()
            await asyncio.sleep(3600)
        await asyncio.sleep(ANSWER_S)
        return Turn(messages=[QUESTION], done=self._num_replies == NUM_TURNS)

    async def close(self) -> None: ...


class InThisProcess:
    """An engine as the pool asks for it, without Ray."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def ask(self, timeout_s: float, method: Callable[..., Any], *args: Any) -> Any:
        return method(self._engine, *args)

    def tell(self, method: Callable[..., Any], *args: Any) -> None:
        method(self._engine, *args)

    def kill(self) -> None: ...


class Noted:
    """A pool that notes the requests of episodes."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest, home: Home | None = None) -> Future[Completion]:
        self.requests.append(request)
        submitted: Future[Completion] = self._pool.submit(request, home)
        return submitted


class Setting:
    """The engine with what asks it."""

    def __init__(
        self,
        folder: Path,
        at_once: int,
        make_runner: Callable[[Any, ChatFormat, GRPOConfig], Any],
        *,
        num_turns: int = NUM_TURNS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        from open_instruct.generation.engine import Engine
        from open_instruct.generation.engine_pool import EnginePool

        settings = EngineSettings(
            model_folder=str(folder),
            tokenizer_folder=str(folder),
            dtype="float32",
            max_model_len=MAX_TOKENS + 64,
            batching=Batching(max_num_seqs=64, max_num_batched_tokens=4096, schedules_ahead=False),
            fleet=FleetSection(
                vllm_kv_cache_mib=256, vllm_enforce_eager=True, vllm_enable_prefix_caching=False
            ),
            seed=0,
        )
        self._engine = Engine(settings)
        self._clock = time.pthread_getcpuclockid(self._engine._thread.ident or 0)
        handle: Any = InThisProcess(self._engine)
        self._pool = EnginePool(
            [handle],
            make_engine=lambda index: sys.exit("the engine died"),
            on_restart=lambda index: None,
            on_failure=lambda error: None,
            fleet=FleetSection(engine_timeout_s=60, max_restarts=0),
            say=lambda text: print(text, file=sys.stderr),
        )
        self.noted = Noted(self._pool)
        self.chat = ChatFormat.choose(load_tokenizer(str(folder), flag="model"), None)
        noted: Any = self.noted
        needed = [
            "--model_name_or_path",
            str(folder),
            "--dataset_mixer_list",
            "none",
            "1.0",
            "--output_dir",
            "none",
        ]
        lengths = ["--max_prompt_token_length", "64", "--response_length", str(MAX_TOKENS)]
        config = parse_run(GRPOConfig, [*needed, *lengths])
        config.environment = EnvironmentSection(
            max_turns=num_turns, turn_length=REPLY_TOKENS, environment_timeout_s=timeout_s
        )
        self.runner = make_runner(noted, self.chat, config)
        self._at_once = at_once

    def episodes(
        self, fails: Sequence[str], *, seed: int
    ) -> list[tuple[Future[Completion], list[float]]]:
        """All completions, at most so many at once, each with the time at which it came."""
        (token_ids,) = self.chat.tokenize([self.chat.render([QUESTION], ())[0]])  # type: ignore[list-item]
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
        slots = BoundedSemaphore(self._at_once)
        asked = []
        for number, fate in enumerate(fails):
            row = {"messages": [QUESTION], "number": number, "fails": fate}
            prompt = Prompt(
                row_id=number,
                token_ids=tuple(token_ids),
                text="",
                checks=(),
                environment="slow",
                row=row,
            )
            (request,) = build_requests(prompt, 1, sampling, seed=seed, place=(number,))
            slots.acquire()
            came_s: list[float] = []
            future = self.runner.ask(prompt, request)
            future.add_done_callback(
                lambda _, came_s=came_s: (came_s.append(time.monotonic()), slots.release())
            )
            asked.append((future, came_s))
        wait([future for future, _ in asked])
        return asked

    def speed(self, work: Callable[[], list[Completion]]) -> float:
        """Tokens for a second of the engine's CPU."""
        began_s = time.clock_gettime(self._clock)
        num_tokens = sum(len(completion.logprobs) for completion in work())
        return num_tokens / (time.clock_gettime(self._clock) - began_s)

    def alone(self) -> list[Completion]:
        """The completions of the requests that were noted, all asked at once."""
        requests, self.noted.requests = self.noted.requests, []
        return [future.result() for future in [self._pool.submit(request) for request in requests]]

    def close(self) -> None:
        self.runner.close()
        self._pool.close()


def main() -> None:
    with prepare_engine(__doc__) as (args, folder):
        setting = Setting(
            folder,
            args.at_once,
            lambda pool, chat, config: Conversations(pool, chat, {"slow": Slow}, config),
        )

        def in_environments(number: int) -> float:
            asked = lambda: setting.episodes(["no"] * args.num_episodes, seed=number)  # noqa: E731
            return setting.speed(lambda: [future.result() for future, _ in asked()])

        missed = compare_speeds(
            {"episodes": in_environments, "own": lambda number: setting.speed(setting.alone)},
            num_rounds=args.num_rounds,
            between=f"{args.at_once} environments of {1000 * ANSWER_S:.0f} ms to the engine's own",
            least_ratio=WANTED_RATIO,
        )
        missed += failing(setting, args.num_episodes)
        setting.close()
    end(missed)


def failing(setting: Setting, num_episodes: int) -> list[str]:
    """Sentences about episodes that were lost or late, where a tenth hang and a twentieth raise."""
    fates = [
        "raises" if number % 20 == 7 else "hangs" if number % 10 == 3 else "no"
        for number in range(num_episodes)
    ]
    asked = setting.episodes(fates, seed=99)
    statuses = Counter(future.result().episode.status for future, _ in asked)  # type: ignore[union-attr]
    late_s = [
        came_s[0] - Slow.hung_s[number] - TIMEOUT_S
        for number, (_, came_s) in enumerate(asked)
        if number in Slow.hung_s
    ]
    print(
        f"{num_episodes} episodes, a tenth hang and a twentieth raise: "
        + ", ".join(f"{n} {s}" for s, n in statuses.items())
    )
    print(f"those that hung came at most {max(late_s):.2f} s after their {TIMEOUT_S:g} s")
    expected = {"timeout": fates.count("hangs"), "env_error": fates.count("raises")}
    missed = [
        f"{wanted} episodes should be {status}"
        for status, wanted in expected.items()
        if statuses[status] != wanted
    ]
    return missed + (["an episode was late"] if max(late_s) > LATE_S else [])


if __name__ == "__main__":
    main()
