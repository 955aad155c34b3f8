"""The agents of one node, in a process there: their endpoint, their programs, their sessions.

What their sessions ask engines for goes to the driver, which alone speaks to engines, and the
completions come back. Finished episodes go to the driver, too.
"""

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Completion, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.environments.agent_walls import refuse_missing_walls
from open_instruct.environments.agents import AgentProgram
from open_instruct.environments.registry import find_factory
from open_instruct.generation.engine_pool import set_outcome
from open_instruct.generation.requests import GenerationRequest, Home
from open_instruct.rl.agents.episodes import AgentEpisodes

Outcome = Completion | RunError


@dataclass(slots=True)
class NodeNews:
    """What has happened on a node since the driver asked last, by keys.

    The keys of requests and of episodes are counted apart.
    """

    requests: dict[int, tuple[GenerationRequest, int | None]] = field(default_factory=dict)
    """With the engine that holds the session's keys and values, if one does."""

    cancelled: list[int] = field(default_factory=list)  # requests that are given up
    episodes: dict[int, Outcome] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.requests or self.cancelled or self.episodes)


class Mailbox:
    """News for the driver, until it takes them. Thread-safe."""

    def __init__(self) -> None:
        self._news = NodeNews()
        self._condition = threading.Condition()

    def add_request(self, key: int, request: GenerationRequest, engine: int | None) -> None:
        with self._condition:
            self._news.requests[key] = (request, engine)
            self._condition.notify_all()

    def add_cancelled(self, key: int) -> None:
        with self._condition:
            if self._news.requests.pop(key, None) is None:
                self._news.cancelled.append(key)
            self._condition.notify_all()

    def add_episode(self, key: int, outcome: Outcome) -> None:
        with self._condition:
            self._news.episodes[key] = outcome
            self._condition.notify_all()

    def take(self, wait_s: float) -> NodeNews:
        """Take all news; waits up to `wait_s` for some."""
        with self._condition:
            self._condition.wait_for(lambda: self._news, wait_s)
            news = self._news
            self._news = NodeNews()
        return news


class RelayedEngines:
    """Engines as a session of this node asks them: by way of the driver. Thread-safe."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._keys = itertools.count()
        self._waiting: dict[int, tuple[Future[Completion], Home]] = {}
        self._lock = threading.Lock()

    def submit(self, request: GenerationRequest, home: Home) -> Future[Completion]:
        """Submit a request, as `EnginePool.submit` does."""
        future: Future[Completion] = Future()
        with self._lock:
            key = next(self._keys)
            self._waiting[key] = (future, home)
        self._mailbox.add_request(key, request, home.engine)
        future.add_done_callback(partial(self._forget_cancelled, key))
        return future

    def deliver(self, key: int, outcome: Outcome, engine: int | None) -> None:
        """Take what came of a request, and at which engine."""
        with self._lock:
            found = self._waiting.pop(key, None)
        if found is not None:
            future, home = found
            home.engine = engine
            set_outcome(future, outcome)

    def _forget_cancelled(self, key: int, future: Future[Completion]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            found = self._waiting.pop(key, None)
        if found is not None:
            self._mailbox.add_cancelled(key)


class AgentNode:
    """Runs episodes of agents on one node, whose driver calls all of its methods.

    Args:
        config: of the run.
        tokenizer_folder: which every node can read.
        names: of the environments that are agents.
        working_folder: of the driver, in which programs run here too.

    Raises:
        InputError: an agent, the tokenizer or the folder is not on this node, or there can be no
            walls of `--agent_sandbox`.
    """

    def __init__(
        self,
        *,
        config: GRPOConfig,
        tokenizer_folder: str,
        names: Sequence[str],
        working_folder: str,
    ) -> None:
        if not Path(working_folder).is_dir():
            raise InputError(
                f"{working_folder}, the working folder, is not on a node where agents would run: "
                "start the run in a folder that all nodes share",
                kind="missing_file",
            )
        os.chdir(working_folder)
        if config.environment.agent_sandbox:
            refuse_missing_walls()
        programs = {name: make_program(name) for name in names}
        for program in programs.values():
            program.begin_run()
        tokenizer = load_tokenizer(tokenizer_folder, flag="model_name_or_path")
        self._mailbox = Mailbox()
        self._engines = RelayedEngines(self._mailbox)
        self._episodes = AgentEpisodes(
            self._engines, ChatFormat.from_flags(tokenizer, config.data), programs, config
        )
        self._in_flight: dict[int, Future[Completion]] = {}

    def begin(self, key: int, prompt: Prompt, request: GenerationRequest) -> None:
        """Begin an episode; `poll` returns what comes of it under its key."""
        future = self._episodes.ask(prompt, request)
        self._in_flight[key] = future
        future.add_done_callback(partial(self._finish, key))

    def cancel(self, key: int) -> None:
        """Give an episode up."""
        future = self._in_flight.pop(key, None)
        if future is not None:
            future.cancel()

    def deliver(self, outcomes: Mapping[int, tuple[Outcome, int | None]]) -> None:
        """Take completions of engines, by the keys of their requests, and where they were made."""
        for key, (outcome, engine) in outcomes.items():
            self._engines.deliver(key, outcome, engine)

    def poll(self, wait_s: float) -> NodeNews:
        """What has happened since the last call; waits up to `wait_s` for something."""
        return self._mailbox.take(wait_s)

    def shutdown(self) -> None:
        """End all programs."""
        self._episodes.close()

    def _finish(self, key: int, future: Future[Completion]) -> None:
        self._in_flight.pop(key, None)
        if future.cancelled():
            return
        error = future.exception()
        outcome: Outcome
        if error is None:
            outcome = future.result()
        elif isinstance(error, RunError):
            outcome = error
        else:  # a fault of ours, which another process may have no class for
            outcome = RunError(f"an agent's episode failed: {type(error).__name__}: {error}")
        self._mailbox.add_episode(key, outcome)


def make_program(name: str) -> AgentProgram:
    """The agent of an environment's name, on this node."""
    return cast(AgentProgram, find_factory(name, origin=f"--environment {name}"))


def as_outcome(future: Future[Any]) -> Outcome | None:
    """What came of a request; None where it was given up."""
    if future.cancelled():
        return None
    error = future.exception()
    if error is None:
        completion: Completion = future.result()
        return completion
    return error if isinstance(error, RunError) else RunError(str(error))
