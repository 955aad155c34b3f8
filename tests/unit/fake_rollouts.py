"""Flags, groups, engines and verifiers that a test can steer: what they answer depends on the
request alone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.generation.requests import GenerationRequest

PROMPT = Prompt(
    row_id=7,
    token_ids=(1, 40, 2),
    text="2 + 2?",
    checks=(Check(verifier="math", ground_truth="4"),),
)


def grpo_config(*words: str) -> GRPOConfig:
    required = [
        "--model_name_or_path",
        "m",
        "--dataset_mixer_list",
        "prompts.jsonl",
        "1.0",
        "--output_dir",
        "out",
    ]
    return parse_run(GRPOConfig, [*required, *words])


def completion(
    num_tokens: int = 2,
    *,
    text: str = "4",
    versions: tuple[int, ...] | None = None,
    ends: Literal["stop", "length"] = "stop",
    seed: int = 0,
) -> Completion:
    return Completion(
        token_ids=tuple(range(60, 60 + num_tokens)),
        logprobs=tuple(-0.1 * i for i in range(num_tokens)),
        versions=versions or (0,) * num_tokens,
        text=text,
        finish_reason=ends,
        seed=seed,
    )


def group_of(
    rewards: Sequence[float],
    completions: Sequence[Completion] | None = None,
    *,
    ticket: int = 0,
    prompt: Prompt = PROMPT,
    **scores: float,
) -> RolloutGroup:
    """A group with these rewards, which are the scores too where `scores` are not given for all."""
    return RolloutGroup(
        ticket=ticket,
        prompt=prompt,
        completions=tuple(completions or [completion(seed=index) for index in range(len(rewards))]),
        verdicts=tuple(
            Verdict(reward=reward, scores={"math": reward} | scores) for reward in rewards
        ),
    )


class FakeDataset:
    """As much of a prompt data set as streams and conductors read."""

    fingerprint = "fake"

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts

    def __len__(self) -> int:
        return self._num_prompts

    def __getitem__(self, row_id: int) -> Prompt:
        assert 0 <= row_id < self._num_prompts
        check = Check(verifier="fake", ground_truth=str(row_id))
        return Prompt(
            row_id=row_id, token_ids=(1, row_id + 10), text=f"prompt {row_id}", checks=(check,)
        )


def answer(request: GenerationRequest, *, version: int = 0) -> Completion:
    """What the fake engines make of a request."""
    num_tokens = request.seed % 3 + 1
    return Completion(
        token_ids=tuple(range(num_tokens)),
        logprobs=(-0.5,) * num_tokens,
        versions=(version,) * num_tokens,
        text=f"answer {request.seed}",
        finish_reason="stop",
        seed=request.seed,
    )


class FakePool:
    """Engines that answer when they are told to.

    `version` is what `submit` finds: the oldest a token may be.
    """

    def __init__(self) -> None:
        self.version = 0
        self.requests: list[GenerationRequest] = []
        self.pending: list[tuple[GenerationRequest, int, Future[Completion]]] = []
        self.most_pending = 0
        self.changed = threading.Condition()

    def submit(self, request: GenerationRequest, home: object = None) -> Future[Completion]:
        future: Future[Completion] = Future()
        with self.changed:
            self.requests.append(request)
            self.pending.append((request, self.version, future))
            self.most_pending = max(self.most_pending, len(self.pending))
            self.changed.notify_all()
        return future

    def finish(self, index: int = 0, *, error: Exception | None = None) -> None:
        request, version, future = self.pending.pop(index)
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer(request, version=version))

    def finish_all(self) -> None:
        while self.pending:
            self.finish()


class BusyPool(FakePool):
    """Answers on a thread of its own, in an order that `seed` shuffles."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> BusyPool:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pending or self._is_closed)
                if self._is_closed:
                    return
                chosen = self.pending[self._random.randrange(len(self.pending))]
                self.pending.remove(chosen)
            request, version, future = chosen
            if future.set_running_or_notify_cancel():
                future.set_result(answer(request, version=version))


class FakeReward:
    """Judges by a rule of the prompt and the completion."""

    def __init__(self, rule: Callable[[Prompt, Completion], float]) -> None:
        self.rule = rule

    def judges_groups(self, prompt: Prompt) -> bool:
        return False

    def judge(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Verdict]:
        scores = [self.rule(prompt, completion) for completion in completions]
        return [Verdict(reward=score, scores={"fake": score}) for score in scores]


def coin(prompt: Prompt, completion: Completion) -> float:
    """1 or 0, as good as at random."""
    return float(completion.seed >> 7 & 1)


def without_versions(completion: Completion) -> Completion:
    return replace(completion, versions=(0,) * len(completion.versions))
