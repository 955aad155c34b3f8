"""The checks of a GRPO run's verifiers and environments: each is used once."""

import asyncio
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.episodes import RECORDED
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check, Completion, Prompt
from open_instruct.core.text import spell_count
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.array_file import find_cache_folder
from open_instruct.data.prompts import Prompts
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.agents import AgentProgram
from open_instruct.environments.environment import Factory, begin_run
from open_instruct.rewards.code import Code, CodeStdio
from open_instruct.rewards.function import RewardFunction
from open_instruct.rewards.judge import Judge
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.reward_models import MODEL_VERIFIERS, ModelVerifier
from open_instruct.rewards.sandbox.trial import try_walls
from open_instruct.rewards.trial import TRIAL_ANSWERS
from open_instruct.rewards.verifier import Verifier
from open_instruct.rl.episodes.bridge import check_bridges
from open_instruct.rl.recorded import check_recorded_sessions

MOST_PROMPTS = 64  # that are searched for verifiers and environments
TRIED_ELSEWHERE = (RewardFunction, Judge, ModelVerifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChecks:
    """The checks of what a run's prompts name, once its rows have been read."""

    config: GRPOConfig
    prompts: Prompts
    chat: ChatFormat
    known_verifiers: Mapping[str, Verifier]
    known_environments: Mapping[str, Factory]

    def try_verifiers(self) -> str:
        """Have each verifier of the prompts judge two made-up answers.

        Raises:
            InputError: a reward function raises, a judge does not answer, or programs cannot be
                kept behind walls.
        """
        return "\n".join(self._try_verifiers()) or "no verifier judges these prompts"

    def _try_verifiers(self) -> Iterator[str]:
        verifiers = self.known_verifiers
        flags = self.config.reward
        judges, environments = self.prompts.find_names()
        runs_programs = bool({Code.name, CodeStdio.name} & judges) and not flags.code_api_url
        if runs_programs or "python" in environments:
            notes: list[str] = []
            try_walls(
                flags.code_sandbox,
                say=notes.append,
                warn=lambda text: notes.append(f"warning: {text}"),
            )
            yield from notes
        for name in sorted(judges):
            if isinstance(verifiers[name], Judge):
                verifiers[name].begin_run(find_cache_folder(self.config.data.cache_dir))
                yield f"{name}: {flags.llm_judge_model} answers"
            elif isinstance(verifiers[name], ModelVerifier):
                yield f"{name}: its folder has such a model, which the run loads"
        prompts = list(self.prompts.sample_evenly(MOST_PROMPTS))
        with closing(VerifierPool(drop_models(flags))) as pool:
            yield from pool.try_functions(prompts)
            for prompt, check in find_first_checks(prompts):
                if not isinstance(verifiers[check.verifier], TRIED_ELSEWHERE):
                    yield judge_once(pool, prompt, check)

    def open_environments(self) -> str:
        """Make each environment of the prompts ready, and open it for one of them.

        Raises:
            InputError: one cannot be had, or cannot be opened, or the chat template cannot tell
                turns apart.
        """
        _, names = self.prompts.find_names()
        for name in sorted(names):
            begin_run(self.known_environments[name])
        if not names:
            return "none answers these prompts"
        if RECORDED in names:
            check_recorded_sessions(self.prompts, None, self.config, self.chat)
        if names == {RECORDED}:
            return "recorded sessions answer these prompts"
        check_bridges(self.chat)
        prompts = list(self.prompts.sample_evenly(MOST_PROMPTS))
        first_prompts = {prompt.environment: prompt for prompt in reversed(prompts)}
        lines: list[str] = []
        for name, prompt in first_prompts.items():
            factory = self.known_environments.get(name)
            if isinstance(factory, AgentProgram):
                factory.end_run()
                lines.append(f"{name}: is there; it is not run, as it asks engines")
            elif factory is not None and name != RECORDED:
                lines.append(open_once(name, factory, prompt))
        return "\n".join(lines)


def drop_models(flags: RewardSection) -> RewardSection:
    """The flags of one process of verifiers, without models, which take long to load."""
    words = [word for word in flags.verifier if word.partition(":")[0] not in MODEL_VERIFIERS]
    return replace(flags, verifier=words, num_verifier_processes=1)


def find_first_checks(prompts: list[Prompt]) -> Iterator[tuple[Prompt, Check]]:
    """Find the first prompt that each verifier judges."""
    names_seen: set[str] = set()
    for prompt in prompts:
        for check in prompt.checks:
            if check.verifier not in names_seen:
                names_seen.add(check.verifier)
                yield prompt, check


def judge_once(pool: VerifierPool, prompt: Prompt, check: Check) -> str:
    """The scores of two made-up answers, or a warning that such answers score 0 in a run."""
    outcomes = pool.score(check, prompt.text, [make_completion(text) for text in TRIAL_ANSWERS])
    problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
    if problems:
        return f"warning: on a made-up answer {problems[0]}; such answers score 0"
    scores = " and ".join(f"{outcome.score:g}" for outcome in outcomes)
    return f"{check.verifier}: two made-up answers score {scores}"


def make_completion(text: str) -> Completion:
    return Completion(
        text=text,
        token_ids=(0,),
        logprobs=(0.0,),
        versions=(0,),
        finish_reason="stop",
        seed=0,
    )


def open_once(name: str, factory: Factory, prompt: Prompt) -> str:
    """Open the environment for a prompt, and close it.

    Raises:
        InputError: it raises; names the line, and the columns of the row.
    """

    async def count_tools() -> int:
        environment = make_environment(factory, prompt.row)
        try:
            opening = await environment.start()
        finally:
            await environment.close()
        return len(opening.tools)

    try:
        num_tools = asyncio.run(count_tools())
    except Exception as error:  # foreign code, which may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"the environment {name} cannot be opened ({type(error).__name__}: {error}, at "
            f"{frame.filename}:{frame.lineno}), for a row with {', '.join(prompt.row)}; mend it, "
            "or the row",
            kind="own_code",
            flag="environment",
        ) from error
    tools = f", with {spell_count(num_tools, 'tool')}" if num_tools else ""
    return f"{name}: opened and closed once{tools}"
