"""Engines without a model: what makes their tokens is steered by the test, and they can be
killed.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion
from open_instruct.generation.engine import Engine
from open_instruct.generation.requests import (
    Batching,
    EngineSettings,
    GenerationRequest,
    SamplingSettings,
)

MAX_NUM_SEQS = 4
MAX_PROMPT_LENGTH = 16
TIMEOUT_S = 60.0

SETTINGS = EngineSettings(
    model_folder="model",
    tokenizer_folder="model",
    dtype="float32",
    max_model_len=64,
    batching=Batching(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=None, schedules_ahead=False
    ),
    fleet=FleetSection(),
    seed=0,
)


def request(number: int, *, num_tokens: int = 3, prompt_length: int = 2) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{number}/0",
        prompt_token_ids=(7,) * prompt_length,
        seed=number,
        sampling=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=num_tokens),
    )


def text_of(asked: GenerationRequest) -> str:
    """What a fake engine answers: to whom it belongs."""
    return f"answer {asked.seed}"


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def meanwhile(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run it on a thread of its own, which may hang without holding up the tests."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class FakeCore:
    """Makes tokens of version numbers, as fast as it may.

    Attributes:
        calls: what the engine asked of it, in order, steps as ("step", number of requests).
        failures: by method, what to raise the next time it is called.
        num_steps_begun: a step that is held back counts.
        is_ahead: a step hands out what the one before has finished, as with vLLM's async
            scheduling.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, BaseException] = {}
        self.num_steps_begun = 0
        self.version = 0
        self.is_closed = False
        self.is_ahead = False
        self.absent_parts: set[str] = set()
        self._on_the_way: dict[int, Completion] = {}
        self._running: dict[int, tuple[GenerationRequest, list[int]]] = {}
        self._allowed: threading.Semaphore | None = None

    # For tests

    def hold(self) -> None:
        """From now on a step begins and then waits until it is allowed."""
        self._allowed = threading.Semaphore(0)

    def allow(self, num_steps: int) -> None:
        assert self._allowed is not None
        for _ in range(num_steps):
            self._allowed.release()

    def release(self) -> None:
        """No step waits any more."""
        held, self._allowed = self._allowed, None
        if held is not None:
            held.release(1000)

    # For the engine

    def add(self, key: int, request: GenerationRequest) -> None:
        self._note("add", key)
        if len(request.prompt_token_ids) > MAX_PROMPT_LENGTH:
            raise ValueError("the prompt is too long")
        self._running[key] = (request, [])

    def abort(self, key: int) -> None:
        self._note("abort", key)
        del self._running[key]

    def step(self) -> Mapping[int, Completion]:
        assert not self.absent_parts, "it computes without weights or cache"
        self.num_steps_begun += 1
        if self._allowed is not None:
            assert self._allowed.acquire(timeout=TIMEOUT_S)
        self._note("step", len(self._running))
        finished = {}
        for key, (asked, versions) in list(self._running.items()):
            versions.append(self.version)
            if len(versions) == asked.sampling.max_tokens:
                del self._running[key]
                finished[key] = Completion(
                    token_ids=tuple(range(len(versions))),
                    logprobs=(-0.5,) * len(versions),
                    versions=tuple(versions),
                    text=text_of(asked),
                    finish_reason="length",
                    seed=asked.seed,
                )
        if self.is_ahead:
            finished, self._on_the_way = self._on_the_way, finished
        return finished

    def settle(self) -> Mapping[int, Completion]:
        self._note("settle")
        finished, self._on_the_way = self._on_the_way, {}
        return finished

    def call_workers(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> list[bool]:
        self._note(method.__name__, *args)
        return [True]  # what `has_staged` is asked

    def weights_changed(self, version: int) -> None:
        self._note("weights_changed", version)
        self.version = version

    def release_memory(self) -> None:
        self._note("release_memory")
        self.absent_parts = {"weights", "kv_cache"}

    def take_memory(self, part: str) -> None:
        if part in self.absent_parts:
            self._note("take_memory", part)
            self.absent_parts.remove(part)

    def close(self) -> None:
        self.is_closed = True

    def _note(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))
        if (failure := self.failures.pop(method, None)) is not None:
            raise failure


class InProcessEngine:
    """A handle on an engine of this process, as the pool wants it.

    `die` makes it silent, like a lost process.
    """

    def __init__(self, name: str = "engine", *, fleet: FleetSection = SETTINGS.fleet) -> None:
        self.name = name
        self.core = FakeCore()
        self.engine = Engine(replace(SETTINGS, fleet=fleet), make_core=lambda settings: self.core)
        self.told: list[tuple[str, tuple[Any, ...]]] = []
        self.asked: list[str] = []
        self.is_killed = False
        self.was_closed = False  # in order, before it was killed
        self._death: Future[None] = Future()

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    def tell(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.told.append((method.__name__, args))
        if not self._death.done():
            with suppress(RunError):  # it goes the way of every answer that nobody fetches
                method(self.engine, *args, **kwargs)

    def ask(self, timeout_s: float, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        self.asked.append(name)
        answer = (
            Future[Any]()
            if self._death.done()
            else meanwhile(getattr(self.engine, name), *args, **kwargs)
        )
        wait([answer, self._death], timeout_s, FIRST_COMPLETED)
        if self._death.done():
            raise RunError(f"{self.name} was lost during {name}")
        if not answer.done():
            raise RunError(f"{self.name} did not answer to {name}")
        return answer.result()

    def kill(self) -> None:
        self.is_killed = True
        self.was_closed = self.core.is_closed
        self.die()
        self.core.release()
        threading.Thread(target=self.engine.shutdown, daemon=True).start()

    @property
    def requests(self) -> list[GenerationRequest]:
        """Those that it was told to begin."""
        return [
            asked for method, args in self.told if method == "begin" for asked in args[0].values()
        ]
