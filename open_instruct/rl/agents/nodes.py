"""Agents beside the engines: every node that has engines runs its share of the episodes.

The driver keeps what is the run's: which node runs which episode, and all requests to engines. A
node that dies is started again, and its episodes begin anew; they are then as they would have been.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from open_instruct.cluster.actor_handle import ActorHandle
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Prompt
from open_instruct.generation.engine_pool import EnginePool, set_outcome
from open_instruct.generation.requests import GenerationRequest, Home
from open_instruct.rl.agents.node import AgentNode, NodeNews, as_outcome

POLL_WAIT_S = 1.0
END_TIMEOUT_S = 15.0

NodeHandle = ActorHandle[AgentNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeInFlight:
    """An episode that a node runs."""

    prompt: Prompt
    request: GenerationRequest
    future: Future[Completion] = field(default_factory=Future)


@dataclass(slots=True)
class _Member:
    """A node with its episodes, and its requests that engines have. Guarded by the nodes' lock."""

    handle: NodeHandle
    episodes: dict[int, EpisodeInFlight] = field(default_factory=dict)
    requests: dict[int, Future[Completion]] = field(default_factory=dict)


class AgentNodes:
    """Runs the episodes of agents on several nodes; thread-safe.

    Args:
        pool: of all engines.
        num_nodes: on which agents run.
        start_node: starts the process of a node, by its index.
        timeout_s: in which a node must answer.
        max_restarts: of all nodes.
        say: called with a line about each node that died.

    Raises:
        InputError: an agent is not on one of the nodes.
        RunError: one did not start.
    """

    def __init__(
        self,
        pool: EnginePool,
        num_nodes: int,
        *,
        start_node: Callable[[int], NodeHandle],
        timeout_s: float,
        max_restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._start_node = start_node
        self._timeout_s = timeout_s
        self._num_restarts_left = max_restarts
        self._say = say
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._failure: RunError | None = None
        self._is_closed = False
        handles = [start_node(index) for index in range(num_nodes)]
        for handle in handles:
            handle.wait_ready(timeout_s)
        self._members = [_Member(handle) for handle in handles]
        for index in range(num_nodes):
            threading.Thread(
                target=self._watch, args=(index,), name=f"agents-{index}", daemon=True
            ).start()

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """Begin an episode with the row of `prompt`; returns the future of its completion."""
        episode = EpisodeInFlight(prompt=prompt, request=request)
        with self._lock:
            key = next(self._keys)
            if self._failure is not None:
                episode.future.set_exception(self._failure)
                return episode.future
            member = min(self._members, key=lambda each: len(each.episodes))
            member.episodes[key] = episode
            member.handle.tell(AgentNode.begin, key, prompt, request)
        episode.future.add_done_callback(partial(self._forget_cancelled, key))
        return episode.future

    def close(self) -> None:
        """Give up all episodes in flight; returns once their programs have ended."""
        with self._lock:
            self._is_closed = True
            members = list(self._members)
        for member in members:
            with suppress(RunError):
                member.handle.ask(END_TIMEOUT_S, AgentNode.shutdown)
            member.handle.kill()

    def _forget_cancelled(self, key: int, future: Future[Completion]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            for member in self._members:
                if member.episodes.pop(key, None) is not None:
                    member.handle.tell(AgentNode.cancel, key)

    # A thread of each node's

    def _watch(self, index: int) -> None:
        while not self._is_closed:
            member = self._members[index]
            try:
                news = member.handle.ask(POLL_WAIT_S + self._timeout_s, AgentNode.poll, POLL_WAIT_S)
            except RunError as error:
                if not self._restart(index, error):
                    return
                continue
            self._pass_on(member, news)

    def _pass_on(self, member: _Member, news: NodeNews) -> None:
        for key, (request, engine) in news.requests.items():
            home = Home(engine)
            future = self._pool.submit(request, home)
            with self._lock:
                member.requests[key] = future
            future.add_done_callback(partial(self._deliver, member, key, home))
        for key in news.cancelled:
            with self._lock:
                given_up = member.requests.pop(key, None)
            if given_up is not None:
                given_up.cancel()
        for key, outcome in news.episodes.items():
            with self._lock:
                episode = member.episodes.pop(key, None)
            if episode is not None:
                set_outcome(episode.future, outcome)

    def _deliver(
        self,
        member: _Member,
        key: int,
        home: Home,
        future: Future[Completion],
    ) -> None:
        with self._lock:
            member.requests.pop(key, None)
        outcome = as_outcome(future)
        if outcome is not None and not self._is_closed:
            member.handle.tell(AgentNode.deliver, {key: (outcome, home.engine)})

    def _restart(self, index: int, error: RunError) -> bool:
        """Start the process of a node again, with its episodes; returns whether it runs."""
        with self._lock:
            if self._is_closed:
                return False
            lost = self._members[index]
            requests = list(lost.requests.values())
            self._num_restarts_left -= 1
            is_last = self._num_restarts_left < 0
        for request in requests:
            request.cancel()
        lost.handle.kill()
        try:
            if is_last:
                raise RunError(
                    f"{error}. That was one more than --max_restarts; give the same command again "
                    "to go on from the last checkpoint"
                )
            self._say(f"{error}; starting its agents again, with their episodes")
            handle = self._start_node(index)
            handle.wait_ready(self._timeout_s)
        except Exception as failure:
            self._fail(failure if isinstance(failure, RunError) else RunError(str(failure)))
            return False
        with self._lock:
            member = _Member(handle, lost.episodes)
            self._members[index] = member
            for key, episode in member.episodes.items():
                handle.tell(AgentNode.begin, key, episode.prompt, episode.request)
        return True

    def _fail(self, failure: RunError) -> None:
        with self._lock:
            self._failure = failure
            episodes = [each for member in self._members for each in member.episodes.values()]
        for episode in episodes:
            set_outcome(episode.future, failure)
