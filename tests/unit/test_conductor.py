"""The conductor: what a step's batch is made of, what is out meanwhile, and what comes back after a restart."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.config.grpo import GRPOConfig
from open_instruct.data.prompts import PromptStream
from open_instruct.episodes.requests import sampling_seed
from open_instruct.errors import RunError
from open_instruct.losses.advantages import has_signal
from open_instruct.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.rollout.conductor import MAX_REJECTED_PER_PROMPT, Conductor
from open_instruct.rollout.samples import RolloutStepBatch, training_samples
from tests.unit.fake_rollouts import BusyPool, FakeDataset, FakePool, FakeReward, coin, grpo_config, without_versions
from tests.unit.plain_rollouts import plain_batches

NUM_PROMPTS = 3  # of a step
NUM_SAMPLES = 2  # of a group
SEED = 5
NUM_STEPS = 6
STALL_TIMEOUT_S = 60.0


def config_of(*words: str) -> GRPOConfig:
    sizes = ["--num_unique_prompts_rollout", f"{NUM_PROMPTS}", "--num_samples_per_prompt_rollout", f"{NUM_SAMPLES}"]
    return grpo_config(*sizes, "--seed", f"{SEED}", *words)


@contextmanager
def conductor(
    pool: FakePool,
    *words: str,
    rule: Callable[[Prompt, Completion], float] = coin,
    num_rows: int = 11,
    num_steps: int = 100,
) -> Iterator[Conductor]:
    config = config_of(*words)
    config.rollout.total_episodes = num_steps * config.num_completions_per_step
    it = Conductor(PromptStream(FakeDataset(num_rows), SEED), pool, FakeReward(rule), config=config)
    yield it
    it.close()


def walk(it: Conductor, pool: FakePool, steps: range) -> Iterator[RolloutStepBatch]:
    """The driver's loop, without the training: each batch before the weights of its step are published."""
    for step in steps:
        yield it.next_batch(step, timeout_s=STALL_TIMEOUT_S)
        pool.version = step
        it.weights_published(step)


def made_of(group: RolloutGroup) -> tuple[Any, ...]:
    """Everything but which weights made it."""
    return group.ticket, group.prompt, tuple(map(without_versions, group.completions)), group.verdicts


def compositions(batches: Iterator[RolloutStepBatch]) -> list[tuple[list[Any], list[Any]]]:
    return [
        ([made_of(group) for group in batch.groups], [made_of(group) for group in batch.rejected]) for batch in batches
    ]


def plainly(*words: str) -> list[tuple[list[Any], list[Any]]]:
    stream = PromptStream(FakeDataset(11), SEED)
    with BusyPool() as pool:
        batches = plain_batches(stream, pool, FakeReward(coin), config=config_of(*words))
        return compositions(islice(batches, NUM_STEPS))


RULES = [
    (),
    ("--no_filter_zero_std_samples",),
    ("--active_sampling",),
    ("--no_resampling_pass_rate", "1.0"),
    ("--active_sampling", "--no_resampling_pass_rate", "1.0"),
]
every_rule = pytest.mark.parametrize("rules", RULES, ids=" ".join)


def shuffled(order: int, async_steps: int, rules: tuple[str, ...]) -> list[tuple[list[Any], list[Any]]]:
    """What the steps are made of where engines answer in a shuffled order."""
    with BusyPool(order) as pool, conductor(pool, "--async_steps", f"{async_steps}", *rules) as it:
        it.start(0)
        return compositions(walk(it, pool, range(1, NUM_STEPS + 1)))


class TestComposition:
    @every_rule
    @settings(max_examples=8)
    @given(order=st.integers(0, 2**32), async_steps=st.integers(0, 3))
    def test_it_is_that_of_the_plain_version(self, rules: tuple[str, ...], order: int, async_steps: int) -> None:
        if "--no_resampling_pass_rate" in rules:
            async_steps = 0  # tickets that are out already are still used, which the plain version has none of
        assert shuffled(order, async_steps, rules) == plainly(*rules)

    @pytest.mark.parametrize("rules", RULES[-2:], ids=" ".join)
    @settings(max_examples=6)
    @given(orders=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)), async_steps=st.integers(1, 3))
    def test_which_completion_is_first_decides_nothing(
        self, rules: tuple[str, ...], orders: tuple[int, int], async_steps: int
    ) -> None:
        assert shuffled(orders[0], async_steps, rules) == shuffled(orders[1], async_steps, rules)


class TestSeeds:
    def test_they_are_those_of_every_python(self) -> None:
        # A checkpoint of today must ask with the same seeds tomorrow.
        assert sampling_seed(5, 41, 2) == 4878955774981050844

    def test_they_fit_a_signed_word_and_differ(self) -> None:
        seeds = {sampling_seed(SEED, ticket, index) for ticket in range(50) for index in range(8)}
        assert len(seeds) == 400
        assert all(0 <= seed < 2**63 for seed in seeds)


class TestResume:
    @every_rule
    @pytest.mark.parametrize("async_steps", [0, 2])
    def test_at_any_step_goes_on_as_if_nothing_had_been(self, async_steps: int, rules: tuple[str, ...]) -> None:
        words = ("--async_steps", f"{async_steps}", *rules)
        states: list[str] = []
        with BusyPool() as pool, conductor(pool, *words) as it:
            it.start(0)
            whole = []
            for step in range(1, NUM_STEPS + 1):
                whole += compositions(walk(it, pool, range(step, step + 1)))
                states.append(json.dumps(it.state_dict()))
        for step, state in enumerate(states, start=1):
            with BusyPool(seed=step) as pool, conductor(pool, *words) as it:
                it.load_state_dict(json.loads(state))
                it.start(step)
                assert compositions(walk(it, pool, range(step + 1, NUM_STEPS + 1))) == whole[step:]

    @settings(max_examples=20)
    @given(num_steps=st.integers(0, 4), async_steps=st.integers(0, 3), order=st.integers(0, 2**32))
    def test_asks_the_tickets_that_were_not_consumed_first(self, num_steps: int, async_steps: int, order: int) -> None:
        words = ("--async_steps", f"{async_steps}", "--active_sampling")
        with BusyPool(order) as pool, conductor(pool, *words) as it:
            it.start(0)
            batches = list(walk(it, pool, range(1, num_steps + 1)))
            state = json.loads(json.dumps(it.state_dict()))
            asked = {request.request_id: request for request in pool.requests}
        consumed = [group.ticket for batch in batches for group in (*batch.groups, *batch.rejected)]
        unconsumed = [ticket for ticket, _ in state["unconsumed"]]
        # None twice, and none left out.
        assert sorted(consumed) + unconsumed == list(range(len(consumed) + len(unconsumed)))
        with conductor(pool := FakePool(), *words) as it:
            it.load_state_dict(state)
            it.start(num_steps)
            assert pool.requests == [asked[f"{ticket}/{i}"] for ticket in unconsumed for i in range(NUM_SAMPLES)]

    def test_a_state_that_was_loaded_and_not_started_is_saved_again_as_it_was(self) -> None:
        with BusyPool() as pool, conductor(pool) as it:
            it.start(0)
            list(walk(it, pool, range(1, 3)))
            state = it.state_dict()
        with conductor(FakePool()) as it:
            it.load_state_dict(state)
            assert it.state_dict() == state


class TestInFlight:
    @pytest.mark.parametrize("async_steps", [0, 1, 2])
    def test_the_next_step_goes_out_when_weights_are_published(self, async_steps: int) -> None:
        size = NUM_PROMPTS * NUM_SAMPLES
        with conductor(pool := FakePool(), "--async_steps", f"{async_steps}") as it:
            it.start(0)
            assert len(pool.requests) == (async_steps + 1) * size
            pool.finish_all()
            it.next_batch(1, timeout_s=STALL_TIMEOUT_S)
            assert len(pool.requests) == (async_steps + 1) * size
            it.weights_published(1)
            assert len(pool.requests) == (async_steps + 2) * size

    @every_rule
    @pytest.mark.parametrize("async_steps", [0, 1, 2])
    def test_no_token_is_staler_than_the_steps_that_may_be_out(self, async_steps: int, rules: tuple[str, ...]) -> None:
        """And no more completions are asked for at once."""
        words = ("--async_steps", f"{async_steps}", *rules)
        staleness = []
        with BusyPool() as pool, conductor(pool, *words) as it:
            it.start(0)
            for step, batch in enumerate(walk(it, pool, range(1, 8)), start=1):
                learned = training_samples(batch, config=config_of(*words).rollout, version=step - 1)
                staleness.append(learned.metrics["staleness/max"])
        assert max(staleness) <= async_steps
        assert pool.most_pending <= (async_steps + 1) * NUM_PROMPTS * NUM_SAMPLES
        if "--active_sampling" not in rules:
            # The oldest weights that may have made a token are exactly that old: the bound is no looser than it is.
            assert staleness == [min(step, async_steps) for step in range(7)]

    def test_nothing_is_asked_for_steps_after_the_last(self) -> None:
        with BusyPool() as pool, conductor(pool, "--async_steps", "2", num_steps=4) as it:
            it.start(0)
            list(walk(it, pool, range(1, 5)))
            assert it.state_dict()["unconsumed"] == []
        assert len(pool.requests) == 4 * NUM_PROMPTS * NUM_SAMPLES

    def test_stats_follow_the_completions(self) -> None:
        judging, judged = threading.Event(), threading.Event()

        def slow(prompt: Prompt, completion: Completion) -> float:
            judging.set()
            assert judged.wait(STALL_TIMEOUT_S)
            return 1.0

        size = NUM_PROMPTS * NUM_SAMPLES
        with conductor(pool := FakePool(), "--async_steps", "1", rule=slow) as it:
            it.start(0)
            assert it.stats() == {"in_flight": 2 * size, "verifying": 0, "waiting": 0}
            for _ in range(size):
                pool.finish()
            assert judging.wait(STALL_TIMEOUT_S)
            assert it.stats() == {"in_flight": size, "verifying": size, "waiting": 0}
            judged.set()
            it.next_batch(1, timeout_s=STALL_TIMEOUT_S)
            it.weights_published(1)
            assert it.stats() == {"in_flight": 2 * size, "verifying": 0, "waiting": 0}


class TestActiveSampling:
    def test_refills_groups_without_signal(self) -> None:
        with BusyPool() as pool, conductor(pool, "--active_sampling", "--async_steps", "1") as it:
            it.start(0)
            batches = list(walk(it, pool, range(1, 6)))
        assert all(len(batch.groups) == NUM_PROMPTS for batch in batches)
        assert all(has_signal(group.rewards) for batch in batches for group in batch.groups)
        rejected = [group for batch in batches for group in batch.rejected]
        assert rejected and not any(has_signal(group.rewards) for group in rejected)

    def test_gives_up_where_nothing_can_be_learned(self) -> None:
        with BusyPool() as pool, conductor(pool, "--active_sampling", rule=lambda *_: 1.0) as it:
            it.start(0)
            with pytest.raises(RunError, match=r"--active_sampling rejected \d+ groups of step 1.* mean is 1\)"):
                it.next_batch(1, timeout_s=STALL_TIMEOUT_S)
        assert len(pool.requests) <= (MAX_REJECTED_PER_PROMPT + 2) * NUM_PROMPTS * NUM_SAMPLES

    def test_gives_up_at_once_where_no_verdict_is_a_real_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = Verdict(reward=0.0, scores={"fake": 0.0}, problems=("fake: KeyError: 'x'",))
        monkeypatch.setattr(FakeReward, "judge", lambda _, prompt, completions: [broken] * len(completions))
        with BusyPool() as pool, conductor(pool, "--active_sampling") as it:
            it.start(0)
            with pytest.raises(RunError, match=r"verdicts of a step failed.*fake: KeyError"):
                it.next_batch(1, timeout_s=STALL_TIMEOUT_S)
        assert len(pool.requests) <= 4 * NUM_PROMPTS * NUM_SAMPLES


class TestNoResampling:
    def test_solved_rows_are_not_drawn_again(self) -> None:
        solved = {0, 2, 5}

        def rule(prompt: Prompt, completion: Completion) -> float:
            return 1.0 if prompt.row_id in solved else coin(prompt, completion) / 2

        with BusyPool() as pool, conductor(pool, "--no_resampling_pass_rate", "1.0", rule=rule) as it:
            it.start(0)
            groups = [group for batch in walk(it, pool, range(1, 12)) for group in batch.groups]
        for row in solved:
            tickets = [group.ticket for group in groups if group.prompt.row_id == row]
            step = tickets[0] // NUM_PROMPTS + 1
            # When that step's batch was complete, one more step's tickets were out already.
            assert max(tickets) < (step + 1) * NUM_PROMPTS
        unsolved = [group.prompt.row_id for group in groups if group.prompt.row_id not in solved]
        assert min(map(unsolved.count, set(unsolved))) >= 3

    def test_the_share_that_counts_as_solved(self) -> None:
        # One of two completions is right in every group, so a rate of a half excludes each row once it was asked.
        def rule(prompt: Prompt, completion: Completion) -> float:
            return float(completion.seed in first_seeds)

        first_seeds = {sampling_seed(SEED, ticket, 0) for ticket in range(100)}
        words = ("--async_steps", "0", "--no_resampling_pass_rate")
        with BusyPool() as pool, conductor(pool, *words, "0.51", rule=rule, num_rows=3) as it:
            it.start(0)
            rows = [group.prompt.row_id for batch in walk(it, pool, range(1, 3)) for group in batch.groups]
        assert sorted(rows) == [0, 0, 1, 1, 2, 2]
        with BusyPool() as pool, conductor(pool, *words, "0.5", rule=rule, num_rows=3) as it:
            it.start(0)
            with pytest.raises(RunError, match="all 3 prompts"):
                list(walk(it, pool, range(1, 3)))


class TestFailure:
    def test_of_the_engines_is_passed_on_though_all_verifiers_hang(self) -> None:
        came = threading.Event()

        def hang(prompt: Prompt, completion: Completion) -> float:
            assert came.wait(STALL_TIMEOUT_S)
            return 0.0

        with conductor(pool := FakePool(), "--async_steps", "5", rule=hang) as it:
            it.start(0)
            for _ in range(20):  # more than threads that judge
                pool.finish()
            pool.finish(error=RunError("no engine is left"))
            with pytest.raises(RunError, match=r"^no engine is left$"):
                it.next_batch(1, timeout_s=3)
            came.set()

    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit("bad")], ids=["error", "exit"])
    def test_of_a_verifier_names_the_completion(self, error: BaseException) -> None:
        def broken(prompt: Prompt, completion: Completion) -> float:
            raise error

        with conductor(pool := FakePool(), rule=broken) as it:
            it.start(0)
            row = it.state_dict()["unconsumed"][0][1]
            pool.finish()
            message = rf"completion 0/0 \(row {row}\) could not be judged: {type(error).__name__}: bad"
            with pytest.raises(RunError, match=message):
                it.next_batch(1, timeout_s=STALL_TIMEOUT_S)

    def test_of_nothing_arriving_names_what_is_waited_for(self) -> None:
        with conductor(pool := FakePool(), "--async_steps", "1") as it:
            it.start(0)
            pool.finish()
            with pytest.raises(RunError) as caught:
                it.next_batch(1, timeout_s=0.2)
        message = str(caught.value)
        assert "0.2 s while ticket 0 (row " in message
        assert "waited for 1 of its 2. Tickets up to 5 are out: 11 completions with the engines, 0 with the" in message

    def test_a_step_that_was_not_made_ready_is_a_mistake(self) -> None:
        with conductor(FakePool()) as it:
            it.start(0)
            with pytest.raises(AssertionError, match="step 2"):
                it.next_batch(2)

    def test_what_arrives_after_closing_is_dropped(self) -> None:
        judged = []

        def rule(prompt: Prompt, completion: Completion) -> float:
            judged.append(completion)
            return 0.0

        with conductor(pool := FakePool(), rule=rule) as it:
            it.start(0)
            random.Random(0).shuffle(pool.pending)
        pool.finish_all()
        assert not judged
        assert it.stats()["verifying"] == 0
