"""Episodes that were recorded before the run: a prompt's samples are its row's sessions.

`open-instruct sessions --groups` writes such rows. The engines are not asked: what is learned was
sampled by the model that was served, so every token has a version before the run's first, and the
ratio of learner to engine is that to the model that was served.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.episodes import BEFORE_RUN, RECORDED
from open_instruct.core.errors import InputError
from open_instruct.core.records import (
    Completion,
    Episode,
    EpisodeBranch,
    Prompt,
)
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.prompts import Prompts
from open_instruct.data.sampled.sampled_rows import SAMPLED, SampledBranch, read_branch
from open_instruct.generation.requests import GenerationRequest

MAX_PROBLEMS_SHOWN = 3
SESSIONS = "sessions"
REWARD = "recorded"  # its name in the metrics


class RecordedEpisodes:
    """Answers each sample of a prompt with the session of its row that has the same place."""

    def ask(self, prompt: Prompt, request: GenerationRequest) -> Future[Completion]:
        """Answer at once: the future is done."""
        answer: Future[Completion] = Future()
        place = int(request.request_id.rpartition("/")[2])
        answer.set_result(build_completion(prompt.row[SESSIONS][place]))
        return answer

    def close(self) -> None:
        """Nothing is in flight."""


def build_completion(session: Mapping[str, Any]) -> Completion:
    """The completion of a session, whose last branch is its main one."""
    *others, main = session["branches"]
    known: set[int] = set()
    branches: list[EpisodeBranch] = []
    for each in (main, *others):
        sampled = _read_sampled(each)
        branches.append(_build_branch(sampled, each["agent"], known))
        known |= set(sampled.numbers)
    first, *rest = branches
    is_cut = _read_sampled(main).is_cut
    return Completion(
        token_ids=first.token_ids,
        logprobs=first.logprobs,
        versions=first.versions,
        text=_find_last_reply(session["turns"]),
        finish_reason="length" if is_cut else "stop",
        seed=0,
        episode=Episode(
            status="length" if is_cut else "done",
            replies=first.replies,
            turns=tuple(session["turns"]),
            rewards={REWARD: session["reward"]},
            prompt_token_ids=first.prompt_token_ids,
            branches=tuple(each for each in rest if each.num_shared < len(each.replies)),
            agent=first.agent,
        ),
    )


def check_recorded_sessions(
    prompts: Prompts, held_out: Prompts | None, config: GRPOConfig, chat: ChatFormat
) -> None:
    """Check the prompts that recorded sessions answer.

    Raises:
        InputError: some are held out; or their sessions are of another number, temperature,
            tokenizer or template than the run's, are longer than its limits, or cannot be read.
    """
    if held_out is not None and RECORDED in held_out.find_names()[1]:
        raise InputError(
            "the held-out prompts have recorded sessions, which say nothing of this policy: leave "
            "out --eval_split, or give prompts of their own by --dataset_mixer_eval_list",
            kind="conflict",
        )
    problems: list[str] = []
    for prompt in prompts:
        if prompt.environment == RECORDED:
            found = _find_problems(prompt, config, chat)
            problems += [f"row {prompt.row_id}: {problem}" for problem in found]
        if len(problems) >= MAX_PROBLEMS_SHOWN:
            break
    if problems:
        raise InputError("recorded sessions: " + "; ".join(problems), kind="conflict")


def _find_problems(prompt: Prompt, config: GRPOConfig, chat: ChatFormat) -> Iterator[str]:
    rollout = config.rollout
    sessions = prompt.row.get(SESSIONS)
    if not isinstance(sessions, Sequence):
        yield f"no {SESSIONS!r}: `open-instruct sessions --groups` writes such rows"
        return
    size = rollout.num_samples_per_prompt_rollout
    if len(sessions) != size:
        yield f"{len(sessions)} sessions, and --num_samples_per_prompt_rollout {size}"
    try:
        entries = chain.from_iterable(session["branches"] for session in sessions)
        branches = list(map(_read_sampled, entries))
    except (KeyError, TypeError, MalformedRow) as error:
        yield f"a session that cannot be read: {error}"
        return
    if any(branch.chat_format != chat.fingerprint for branch in branches):
        yield "the ids are of another tokenizer or chat template than the run's"
    for name, ours, theirs in (
        ("temperature", rollout.temperature, {branch.temperature for branch in branches}),
        ("vllm_top_p", rollout.vllm_top_p, {branch.top_p for branch in branches}),
    ):
        if theirs != {ours}:
            yield f"sampled with {sorted(theirs)}, and the run has --{name} {ours:g}"
    longest = max(len(each.prompt_token_ids) + len(each.token_ids) for each in branches)
    if longest > config.data.max_seq_length:
        yield (
            f"{longest} tokens, and --max_prompt_token_length and --response_length together are "
            f"{config.data.max_seq_length}"
        )


def _read_sampled(branch: Mapping[str, Any]) -> SampledBranch:
    """:raises MalformedRow: a branch of a session is none of ours."""
    sampled = read_branch(branch)
    if sampled is None or not sampled.replies:
        raise MalformedRow(SAMPLED, "a branch has no sampled replies")
    return sampled


def _build_branch(sampled: SampledBranch, agent: str, known: set[int]) -> EpisodeBranch:
    return EpisodeBranch(
        prompt_token_ids=sampled.prompt_token_ids,
        token_ids=sampled.token_ids,
        replies=sampled.spans,
        logprobs=sampled.logprobs,
        versions=(BEFORE_RUN,) * len(sampled.logprobs),
        num_shared=sum(number in known for number in sampled.numbers),
        agent=agent,
    )


def _find_last_reply(turns: Sequence[Mapping[str, Any]]) -> str:
    replies = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    return replies[-1] if replies else ""
