"""Agents that ask over HTTP: what an engine loses by them, what a request costs, and what becomes of
agents that fail.

    python benchmarks/agents.py [--num_episodes 400] [--at_once 200] [--num_rounds 3]

A tiny model's engine, the pool of engines, the endpoint and the walk of agents' episodes are those
of a run, in one process. Each episode is a process of its own that makes five calls, for replies of
24 tokens. The driver's own walk has as many episodes of five replies, in environments of this
process: "walk". Both are counted in tokens for a second of the engine's CPU, as in
benchmarks/episodes.py.

Then 200 sessions make five calls each to an endpoint whose engine answers at once: what is left is
the overhead of a request, as its client sees it.

Last, a tenth of the agents hang and a twentieth kill themselves: every episode must come back.

CPUs only. The exit code is 1 if the ratio is under 0.9, the overhead above 3 ms at the median or
10 ms at the 95th percentile, or an episode is lost.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from statistics import median, quantiles
from typing import Any

from episodes import ANSWER_S, MAX_TOKENS, QUESTION, REPLY_TOKENS, Setting, Slow
from harness import BENCHMARKS
from harness.episode_speeds import compare_speeds, prepare_engine
from harness.program import end

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.records import Completion
from open_instruct.data.chat import ChatFormat
from open_instruct.environments.agents import AgentProgram
from open_instruct.environments.environment import Reply, Turn
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rl.agents.api_requests import RunSampling
from open_instruct.rl.agents.endpoint import AgentEndpoint
from open_instruct.rl.agents.episodes import AgentEpisodes
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from open_instruct.rl.episodes.conversations import Conversations

NUM_CALLS, NUM_SESSIONS = 5, 200
TIMEOUT_S = 20.0  # in which 200 processes, forked at once on two cores, have all had their turn
WANTED_RATIO, MEDIAN_MS, P95_MS = 0.9, 3.0, 10.0
PROGRAM = f"{BENCHMARKS / 'agent_programs' / 'five_calls.py'}:solve"


class Endless(Slow):
    """An environment that asks on, until the episode has had its turns."""

    async def step(self, reply: Reply) -> Turn:
        await asyncio.sleep(ANSWER_S)
        return Turn(messages=[QUESTION])


class Runners:
    """Both ways of running an episode, under the name that episodes have in `Setting`."""

    def __init__(self, pool: Any, chat: ChatFormat, config: GRPOConfig) -> None:
        program = AgentProgram(PROGRAM, origin="agents.py")
        self.agents = AgentEpisodes(pool, chat, {"slow": program}, config)
        self.walk = Conversations(pool, chat, {"slow": Endless}, config)
        self.ask: Callable[..., Future[Completion]] = self.agents.ask

    def close(self) -> None:
        self.agents.close()
        self.walk.close()


class AtOnce:
    """In place of engines: a reply of so many tokens, at once."""

    def __init__(self, end_token_id: int) -> None:
        self._token_ids = (*range(20, 20 + REPLY_TOKENS - 1), end_token_id)

    def submit(self, request: GenerationRequest, home: object = None) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_result(
            Completion(
                token_ids=self._token_ids,
                logprobs=(0.0,) * REPLY_TOKENS,
                versions=(0,) * REPLY_TOKENS,
                text="reply",
                finish_reason="stop",
                seed=request.seed,
            )
        )
        return future


async def measure_overhead(chat: ChatFormat) -> list[float]:
    """The milliseconds of each request, one after the other; the client is in this process."""
    import aiohttp

    template = TurnTemplate(chat)
    pool: Any = AtOnce(min(template.end_token_ids))
    endpoint = AgentEndpoint()
    await endpoint.start()
    took_ms: list[float] = []
    async with aiohttp.ClientSession() as client:
        for number in range(NUM_SESSIONS):
            session = make_session(template, pool, number)
            sampling = RunSampling(temperature=1.0, top_p=1.0, follows=False)
            key = endpoint.open_session(session, sampling)
            history: list[dict[str, Any]] = [dict(QUESTION)]
            for _ in range(NUM_CALLS):
                began_s = time.perf_counter()
                async with client.post(
                    f"{endpoint.base_url}/chat/completions",
                    json={"model": "policy", "messages": history},
                    headers={"Authorization": f"Bearer {key}"},
                ) as answer:
                    reply = await answer.json()
                took_ms.append(1000 * (time.perf_counter() - began_s))
                history += [reply["choices"][0]["message"], QUESTION]
            endpoint.close_session(key)
    await endpoint.stop()
    return took_ms


def make_session(template: TurnTemplate, pool: Any, number: int) -> AgentSession:
    request = GenerationRequest(
        request_id=str(number),
        prompt_token_ids=(),
        seed=number,
        sampling=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
    )
    limits = SessionLimits(
        max_turns=NUM_CALLS,
        max_context=MAX_TOKENS,
        turn_length=None,
        num_at_once=8,
    )
    return AgentSession(
        SessionTree(template),
        template,
        pool,
        request,
        limits,
        call_form="hermes",
        in_thread=asyncio.to_thread,
    )


def check_failing(setting: Setting, num_episodes: int) -> list[str]:
    """Sentences about agents that were lost, where a tenth hang and a twentieth die."""
    fates = ["no"] * num_episodes
    fates[3::10] = ["hangs"] * len(fates[3::10])
    fates[7::20] = ["dies"] * len(fates[7::20])
    asked = setting.episodes(fates, seed=99)
    statuses = Counter(future.result().episode.status for future, _ in asked)  # type: ignore[union-attr]
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    print(f"{num_episodes} agents, of which a tenth hang and a twentieth die: {counts}")
    # One that dies upon a reply that was cut has ended as the policy let it.
    statuses["env_error"] += statuses.pop("length", 0)
    expected = {
        "done": fates.count("no"),
        "timeout": fates.count("hangs"),
        "env_error": fates.count("dies"),
    }
    return [
        f"{count} episodes should be {status}"
        for status, count in expected.items()
        if statuses[status] != count
    ]


def main() -> None:
    with prepare_engine(__doc__) as (args, folder):
        setting = Setting(
            folder,
            args.at_once,
            Runners,
            num_turns=NUM_CALLS,
            timeout_s=TIMEOUT_S,
        )
        runners: Runners = setting.runner

        def measure(runner: AgentEpisodes | Conversations, number: int) -> float:
            def work() -> list[Completion]:
                asked = setting.episodes(["no"] * args.num_episodes, seed=number)
                return [future.result() for future, _ in asked]

            runners.ask = runner.ask
            return setting.speed(work)

        missed = compare_speeds(
            {
                "agents": partial(measure, runners.agents),
                "walk": partial(measure, runners.walk),
            },
            num_rounds=args.num_rounds,
            between=f"{args.at_once} agents at once to the driver's own walk",
            least_ratio=WANTED_RATIO,
        )
        runners.ask = runners.agents.ask
        missed += check_failing(setting, args.num_episodes)
        took_ms = asyncio.run(measure_overhead(setting.chat))
        p95_ms = quantiles(took_ms, n=20)[-1]
        print(
            f"a request takes {median(took_ms):.1f} ms, at p95 {p95_ms:.1f} ms, without an engine"
        )
        if median(took_ms) > MEDIAN_MS or p95_ms > P95_MS:
            missed.append(f"the overhead is above {MEDIAN_MS:g} or {P95_MS:g} ms")
        setting.close()
    end(missed)


if __name__ == "__main__":
    main()
