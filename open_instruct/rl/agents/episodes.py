"""Episodes of agents: a program of the user's asks, the engines reply, until the program ends.

All sessions of a process share one endpoint and one thread; templates and tokenizers work in a
second.
Whatever an agent does costs its own episode alone: its process is ended with the episode, and with
it all that it has started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.records import Completion, EpisodeStatus, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.environments.agents import AgentOutcome, AgentProgram, Endpoint, RunningAgent
from open_instruct.environments.foreign_calls import (
    EnvironmentFault,
    call_foreign,
    describe_error,
)
from open_instruct.generation.requests import GenerationRequest
from open_instruct.rewards.event_loop import start_loop
from open_instruct.rewards.finite import read_reward
from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_requests import MODEL, RunSampling
from open_instruct.rl.agents.endpoint import AgentEndpoint
from open_instruct.rl.agents.finished_session import build_completion
from open_instruct.rl.agents.messages import Turn, read_messages
from open_instruct.rl.agents.session import AgentSession, Engines, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from open_instruct.rl.episodes.tool_calls import detect_call_form

LOOP = "agents"
CLOSE_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.5


class AgentEpisodes:
    """Runs the episodes of agents; thread-safe.

    `close` gives up those in flight, and ends their programs.

    Args:
        programs: by the name of the environment.
    """

    def __init__(
        self,
        pool: Engines,
        chat: ChatFormat,
        programs: Mapping[str, AgentProgram],
        config: GRPOConfig,
    ) -> None:
        self.programs = programs
        self._pool = pool
        self._template = TurnTemplate(chat)
        self._config = config
        form: str = config.environment.tool_call_form
        if form == "auto":
            form = detect_call_form(chat.template.text)
        self._form = form
        self._loop = start_loop(LOOP)
        # One thread, as a tokenizer is for one at a time.
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="agents-turns")
        self._endpoint = AgentEndpoint()
        self._starting = asyncio.Lock()
        self._free = asyncio.Semaphore(config.environment.agent_processes)
        self._episodes: set[asyncio.Task[Any]] = set()

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """Begin an episode with the row of `prompt`; returns the future of its completion."""
        return asyncio.run_coroutine_threadsafe(self._run_episode(prompt, request), self._loop)

    def close(self) -> None:
        """Give up all episodes in flight; returns once their programs have ended."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._give_up(), self._loop).result(CLOSE_TIMEOUT_S)
        for program in self.programs.values():
            program.end_run()
        self._rendering.shutdown(wait=False, cancel_futures=True)

    async def _give_up(self) -> None:
        episodes = list(self._episodes)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        await self._endpoint.stop()

    async def _run_episode(self, prompt: Prompt, request: GenerationRequest) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        self._episodes.add(task)
        task.add_done_callback(self._episodes.discard)
        async with self._starting:
            await self._endpoint.start()
        async with self._free:
            return await self._run_agent(prompt, request)

    async def _run_agent(self, prompt: Prompt, request: GenerationRequest) -> Completion:
        session = self._make_session(prompt, request)
        key = self._endpoint.open_session(session, self._find_sampling(request))
        endpoint = Endpoint(base_url=self._endpoint.base_url, key=key, model=MODEL)
        program = self.programs[prompt.environment]
        agent: RunningAgent | None = None
        status: EpisodeStatus = "done"
        outcome = AgentOutcome()
        problem = ""
        try:
            is_walled = self._config.environment.agent_sandbox
            agent = await call_foreign(program, prompt.row, endpoint, is_walled=is_walled)
            assert agent is not None
            session.start_clock()
            outcome = _check_outcome(await self._wait_for_agent(agent, session), prompt)
        except TimeoutError as late:
            status = "timeout"
            problem = str(late)
        except Exception as error:  # foreign code, which may raise anything
            status = "env_error"
            problem = describe_error(error)
        finally:
            self._endpoint.close_session(key)
            if agent is not None:
                await self._loop.run_in_executor(None, agent.close)
        if session.failure is not None:
            raise session.failure
        limit = session.limit
        if status == "env_error" and session.is_cut:
            limit = limit or "length"
        if limit is not None:
            # A program that fails on a refusal, or on half a reply, has ended as the policy let it.
            status = limit
            problem = ""
        return await self._in_thread(
            partial(
                build_completion,
                session.tree,
                seed=request.seed,
                status=status,
                rewards=outcome.rewards,
                agent_rewards=outcome.agent_rewards,
                problem=problem,
            )
        )

    async def _wait_for_agent(self, agent: RunningAgent, session: AgentSession) -> AgentOutcome:
        """Wait for the end of an agent.

        Raises:
            TimeoutError: it asked for nothing for too long.
            EnvironmentFault: it has failed.
        """
        limit_s = self._config.environment.environment_timeout_s
        run = asyncio.ensure_future(call_foreign(agent.run))
        try:
            while not run.done():
                if session.failure is not None:
                    raise EnvironmentFault("the engines have failed")
                left_s = limit_s - session.idle_s
                if left_s <= 0:
                    raise TimeoutError(
                        f"the agent neither ended nor asked for anything for {limit_s:g} s"
                    )
                await asyncio.wait({run}, timeout=min(left_s, LOOK_INTERVAL_S))
            outcome: AgentOutcome = await run
            return outcome
        finally:
            run.cancel()

    def _make_session(self, prompt: Prompt, request: GenerationRequest) -> AgentSession:
        flags = self._config.environment
        tree = SessionTree(
            self._template,
            row_turns=_read_row_turns(prompt),
            row_token_ids=prompt.token_ids,
        )
        limits = SessionLimits(
            max_turns=min(flags.max_turns, int(prompt.row.get("max_steps") or flags.max_turns)),
            max_context=self._config.data.max_seq_length,
            turn_length=flags.turn_length,
            num_at_once=flags.agent_concurrency,
        )
        return AgentSession(
            tree,
            self._template,
            self._pool,
            request,
            limits,
            call_form=self._form,
            in_thread=self._in_thread,
        )

    def _find_sampling(self, request: GenerationRequest) -> RunSampling:
        return RunSampling(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            follows=self._config.environment.agent_sampling == "follow",
            trained_temperature=self._config.rollout.temperature,
            trained_top_p=self._config.rollout.vllm_top_p,
            model_names=(MODEL, self._config.model.model_name_or_path),
        )

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the one thread for templates and tokenizers; returns its result."""
        return await self._loop.run_in_executor(self._rendering, partial(function, *args))


def _check_outcome(outcome: AgentOutcome, prompt: Prompt) -> AgentOutcome:
    """The outcome of an agent that has ended, with its rewards as numbers.

    Raises:
        ValueError: one is no number, or there are none and nothing else judges the episode.
    """
    if not (outcome.rewards or outcome.agent_rewards or prompt.checks):
        raise ValueError(
            'the agent gave no reward: let it print {"reward": 1.0} in its last line, or return a '
            "number, or name a verifier"
        )
    rewards = {name: read_reward(value, name) for name, value in outcome.rewards.items()}
    agents = {name: read_reward(value, name) for name, value in outcome.agent_rewards.items()}
    return AgentOutcome(rewards=rewards, agent_rewards=agents)


def _read_row_turns(prompt: Prompt) -> tuple[Turn, ...]:
    """The turns of the row; none where an agent could not send them."""
    with suppress(APIError):
        return read_messages(prompt.row["messages"])
    return ()
