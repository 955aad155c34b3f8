"""Recorded sessions as rows to learn from: the best of each prompt, pairs, and groups.

Sessions have one prompt where the first request of each has the same ids. What comes of them has
the ids that were sampled; nothing is rendered or tokenised.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from open_instruct.core.episodes import RECORDED
from open_instruct.core.errors import InputError
from open_instruct.data.conversations.row_keys import find_value
from open_instruct.data.files.rows import MalformedRow, RawRow
from open_instruct.data.sampled.sampled_rows import (
    SAMPLED,
    Ids,
    SampledBranch,
    SampledPair,
    read_branch,
    write_sampled,
)
from open_instruct.rewards.finite import read_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """A session with its reward; the branch of its last reply is the last.

    `rows` are those of the branches.
    """

    rows: tuple[Mapping[str, Any], ...]
    branches: tuple[SampledBranch, ...]
    reward: float

    @property
    def first(self) -> int:
        """The place of the branch with the session's first reply."""
        return min(range(len(self.branches)), key=lambda place: self.branches[place].numbers[0])

    @property
    def prompt_token_ids(self) -> Ids:
        return self.branches[self.first].prompt_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsByPrompt:
    """Sessions by the ids of their first prompt, and how many were left out, by reason."""

    groups: Sequence[Sequence[RecordedSession]]
    left_out: Counter[str] = field(default_factory=Counter)

    def choose_best(self, min_reward: float | None) -> Iterator[dict[str, Any]]:
        """The rows of the best session of each prompt, the first where several are.

        A reply that several branches have is learned in the first of them alone.

        Args:
            min_reward: less is not good enough.
        """
        for group in self.groups:
            best = max(group, key=lambda session: session.reward)
            if min_reward is not None and best.reward < min_reward:
                self.left_out["prompt whose best session is under --min_reward"] += 1
                continue
            known: set[int] = set()
            for row, branch in zip(best.rows, best.branches, strict=True):
                rest = leave_out_replies(branch, known)
                known |= set(branch.numbers)
                if rest.replies:
                    yield {**row, SAMPLED: write_sampled(rest)}

    def make_pairs(self) -> Iterator[dict[str, Any]]:
        """A pair of the best and the worst session of each prompt, at the reply where they part."""
        for group in self.groups:
            best = max(group, key=lambda session: session.reward)
            worst = min(group, key=lambda session: session.reward)
            if best.reward == worst.reward:
                self.left_out["prompt whose sessions have one reward"] += 1
                continue
            pair = make_pair(best, worst)
            if pair is None:
                self.left_out["prompt whose sessions part before no reply of both"] += 1
            else:
                yield pair

    def make_groups(self, size: int) -> Iterator[dict[str, Any]]:
        """Prompts of `grpo` that are answered by so many of their recorded sessions."""
        for group in self.groups:
            num_whole = len(group) - len(group) % size
            for start in range(0, num_whole, size):
                yield make_group(group[start : start + size])
            self.left_out["session beyond groups of --group_size"] += len(group) - num_whole


def read_sessions(rows: Iterable[RawRow], reward_key: str) -> SessionsByPrompt:
    """The sessions of recorded rows, by their prompts.

    Args:
        reward_key: of a row; a session has the reward of its last row.

    Raises:
        InputError: a row is not one of a recorded session, or its reward is no number.
    """
    rows_of: defaultdict[str, list[tuple[Mapping[str, Any], SampledBranch]]] = defaultdict(list)
    rewards: dict[str, float | None] = {}
    for row in rows:
        try:
            value = row.content()
            branch = read_branch(value)
            if branch is None or not isinstance(value.get("session"), str):
                raise MalformedRow("sampled", "the row is not one of a recorded session")
            name = value["session"]
            rewards[name] = _read_reward(value, reward_key)
        except MalformedRow as error:
            raise InputError(f"{row}: {error}", kind="bad_row") from error
        if branch.replies:
            rows_of[name].append((value, branch))
    left_out: Counter[str] = Counter()
    by_prompt: dict[Ids, list[RecordedSession]] = {}
    for name, reward in rewards.items():
        if reward is None:
            left_out["session without a reward"] += 1
            continue
        if not rows_of[name]:
            left_out["session of which nothing was sampled to be learned"] += 1
            continue
        of_session, branches = zip(*rows_of[name], strict=True)
        session = RecordedSession(rows=of_session, branches=branches, reward=reward)
        by_prompt.setdefault(session.prompt_token_ids, []).append(session)
    return SessionsByPrompt(groups=list(by_prompt.values()), left_out=left_out)


def leave_out_replies(branch: SampledBranch, numbers: Set[int]) -> SampledBranch:
    """The branch with these replies as context."""
    places = [place for place, number in enumerate(branch.numbers) if number not in numbers]
    starts = [0]
    for start, stop in branch.replies:
        starts.append(starts[-1] + stop - start)
    logprobs = [branch.logprobs[starts[place] : starts[place + 1]] for place in places]
    return replace(
        branch,
        replies=tuple(branch.replies[place] for place in places),
        numbers=tuple(branch.numbers[place] for place in places),
        turns=tuple(branch.turns[place] for place in places),
        logprobs=tuple(chain.from_iterable(logprobs)),
    )


def make_pair(best: RecordedSession, worst: RecordedSession) -> dict[str, Any] | None:
    """The first replies of two sessions that differ behind the same ids; None where there are none.

    They are looked for in the branches of the last replies.
    """
    chosen = best.branches[-1]
    rejected = worst.branches[-1]
    for place, (ours, theirs) in enumerate(zip(chosen.replies, rejected.replies, strict=False)):
        context = chosen.prompt_token_ids + chosen.token_ids[: ours[0]]
        if context != rejected.prompt_token_ids + rejected.token_ids[: theirs[0]]:
            return None
        chosen_ids = chosen.token_ids[slice(*ours)]
        rejected_ids = rejected.token_ids[slice(*theirs)]
        if chosen_ids == rejected_ids:
            continue
        sampled = SampledPair(
            chat_format=chosen.chat_format,
            prompt_token_ids=context,
            chosen_token_ids=chosen_ids,
            rejected_token_ids=rejected_ids,
        )
        return {
            "chosen": best.rows[-1]["messages"][: chosen.turns[place] + 1],
            "rejected": worst.rows[-1]["messages"][: rejected.turns[place] + 1],
            SAMPLED: write_sampled(sampled),
        }
    return None


def make_group(sessions: Sequence[RecordedSession]) -> dict[str, Any]:
    """A prompt of `grpo` with the sessions that answer it."""
    first = sessions[0]
    turns = first.rows[first.first]["messages"][: first.branches[first.first].turns[0]]
    # A text that a client has written itself has no role of a conversation.
    messages = [turn if turn["role"] != "prompt" else {**turn, "role": "user"} for turn in turns]
    answers = []
    for session in sessions:
        branches = [
            {"agent": row.get("agent") or "", SAMPLED: write_sampled(branch)}
            for row, branch in zip(session.rows, session.branches, strict=True)
        ]
        answers.append(
            {
                "reward": session.reward,
                "turns": session.rows[-1]["messages"],
                "branches": branches,
            }
        )
    return {"messages": messages, "env_config": {"env_name": RECORDED, "sessions": answers}}


def _read_reward(row: Mapping[str, Any], key: str) -> float | None:
    value = find_value(row, key)
    if value is None:
        return None
    if isinstance(value, bool | str):
        raise MalformedRow("reward", f"{key!r} is no number")
    try:
        return read_reward(value, key)
    except ValueError as error:
        raise MalformedRow("reward", str(error)) from error
