"""The conductor: what a step's batch is made of, what is out meanwhile, and what comes back after a
restart.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.data.prompts import PromptStream
from open_instruct.generation.requests import make_sampling_seed
from open_instruct.rl.conductor import (
    MAX_REJECTED_PER_PROMPT,
    Conductor,
    build_group_requests,
    find_solved_rows,
    is_rejected,
)
from open_instruct.rl.episodes.walk import Episodes
from open_instruct.rl.samples import RolloutStepBatch, training_samples
from tests.tiers import num_examples
from tests.unit.fake_rollouts import (
    BusyPool,
    FakeDataset,
    FakePool,
    FakeReward,
    coin,
    grpo_config,
    without_versions,
)

NUM_PROMPTS = 3  # of a step
NUM_SAMPLES = 2  # of a group
SEED = 5
NUM_STEPS = 6
STALL_TIMEOUT_S = 60.0


def config_of(*words: str) -> GRPOConfig:
    sizes = [
        "--num_unique_prompts_rollout",
        f"{NUM_PROMPTS}",
        "--num_samples_per_prompt_rollout",
        f"{NUM_SAMPLES}",
    ]
    return grpo_config(*sizes, "--seed", f"{SEED}", *words)


@contextmanager
def conductor(
    *words: str,
    pool: FakePool | None = None,
    rule: Callable[[Prompt, Completion], float] = coin,
    num_rows: int = 11,
    num_steps: int = 100,
    state: Mapping[str, Any] | None = None,
    start: int | None = 0,
) -> Iterator[tuple[Conductor, FakePool]]:
    """A started conductor and its engines, which answer by themselves unless a `pool` is given."""
    config = config_of(*words)
    config.rollout.total_episodes = num_steps * config.num_completions_per_step
    with nullcontext(pool) if pool is not None else BusyPool() as pool:
        it = Conductor(
            PromptStream(FakeDataset(num_rows), SEED),
            Episodes(pool, FakeReward(rule)),
            rollout=config.rollout,
            num_steps=config.num_steps,
            response_length=config.data.response_length,
            seed=config.optim.seed,
        )
        if state is not None:
            it.load_state_dict(json.loads(json.dumps(state)))
        if start is not None:
            it.weights_published(start)
        yield it, pool
        it.close()


def next_batch(it: Conductor, step: int = 1) -> RolloutStepBatch:
    return it.next_batch(step, timeout_s=STALL_TIMEOUT_S)


def walk(it: Conductor, pool: FakePool, steps: range) -> Iterator[RolloutStepBatch]:
    """The driver's loop, without the training: each batch before the weights of its step are
    published.
    """
    for step in steps:
        yield next_batch(it, step)
        pool.version = step
        it.weights_published(step)


def made_of(group: RolloutGroup) -> tuple[Any, ...]:
    """Everything but which weights made it."""
    return (
        group.ticket,
        group.prompt,
        tuple(map(without_versions, group.completions)),
        group.verdicts,
    )


def compositions(batches: Iterator[RolloutStepBatch]) -> list[tuple[list[Any], list[Any]]]:
    return [
        ([made_of(group) for group in batch.groups], [made_of(group) for group in batch.rejected])
        for batch in batches
    ]


def plain_batches(
    prompts: PromptStream, pool: FakePool, reward: FakeReward, config: GRPOConfig
) -> Iterator[RolloutStepBatch]:
    """The batch of every step, one after the other, without overlap: ask, wait, judge."""
    while True:
        # By whether they are rejected.
        groups: dict[bool, list[RolloutGroup]] = {False: [], True: []}
        while num_missing := config.rollout.num_unique_prompts_rollout - len(groups[False]):
            tickets = [prompts.next() for _ in range(num_missing)]
            asked = []
            for ticket, prompt in tickets:
                requests = build_group_requests(
                    ticket,
                    prompt,
                    rollout=config.rollout,
                    response_length=config.data.response_length,
                    seed=config.optim.seed,
                )
                asked.append([pool.submit(request) for request in requests])
            for (ticket, prompt), futures in zip(tickets, asked, strict=True):
                completions = tuple(future.result() for future in futures)
                verdicts = tuple(reward.judge(prompt, completions))
                group = RolloutGroup(
                    ticket=ticket, prompt=prompt, completions=completions, verdicts=verdicts
                )
                groups[is_rejected(group, config.rollout)].append(group)
        batch = RolloutStepBatch(groups=tuple(groups[False]), rejected=tuple(groups[True]))
        for row_id in find_solved_rows(batch, config.rollout):
            prompts.exclude(row_id)
        yield batch


def plainly(*words: str) -> list[tuple[list[Any], list[Any]]]:
    stream = PromptStream(FakeDataset(11), SEED)
    with BusyPool() as pool:
        batches = plain_batches(stream, pool, FakeReward(coin), config_of(*words))
        return compositions(islice(batches, NUM_STEPS))


RULES = [
    (),
    ("--no_filter_zero_std_samples",),
    ("--active_sampling",),
    ("--no_resampling_pass_rate", "1.0"),
    ("--active_sampling", "--no_resampling_pass_rate", "1.0"),
]
every_rule = pytest.mark.parametrize("rules", RULES, ids=" ".join)


def shuffled(
    order: int, async_steps: int, rules: tuple[str, ...]
) -> list[tuple[list[Any], list[Any]]]:
    """What the steps are made of where engines answer in a shuffled order."""
    words = ("--async_steps", f"{async_steps}", *rules)
    with BusyPool(order) as pool, conductor(*words, pool=pool) as (it, _):
        return compositions(walk(it, pool, range(1, NUM_STEPS + 1)))


class TestComposition:
    @every_rule
    @settings(max_examples=num_examples(8))
    @given(order=st.integers(0, 2**32), async_steps=st.integers(0, 3))
    def test_order_is_that_of_the_plain_version(
        self, rules: tuple[str, ...], order: int, async_steps: int
    ) -> None:
        if "--no_resampling_pass_rate" in rules:
            # Tickets that are out already are still used, which the plain version has none of.
            async_steps = 0
        assert shuffled(order, async_steps, rules) == plainly(*rules)

    @pytest.mark.parametrize("rules", RULES[-2:], ids=" ".join)
    @settings(max_examples=num_examples(6))
    @given(
        orders=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
        async_steps=st.integers(1, 3),
    )
    def test_order_does_not_depend_on_which_completion_is_first(
        self, rules: tuple[str, ...], orders: tuple[int, int], async_steps: int
    ) -> None:
        assert shuffled(orders[0], async_steps, rules) == shuffled(orders[1], async_steps, rules)


class TestSeeds:
    def test_seeds_are_those_of_every_python(self) -> None:
        # A checkpoint of today must ask with the same seeds tomorrow.
        assert make_sampling_seed(5, 41, 2) == 4878955774981050844


def test_verifier_of_whole_groups_gets_all_completions_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[list[int]] = []

    def judge(
        reward: FakeReward, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[Verdict]:
        judged.append([completion.seed for completion in completions])
        return [Verdict(reward=float(place), scores={}) for place in range(len(completions))]

    monkeypatch.setattr(FakeReward, "judges_groups", lambda reward, prompt: True)
    monkeypatch.setattr(FakeReward, "judge", judge)
    with conductor("--async_steps", "0", pool=FakePool()) as (it, pool):
        while pool.pending:
            pool.finish(-1)
        groups = next_batch(it).groups
    assert sorted(judged) == sorted(
        [make_sampling_seed(SEED, t, i) for i in range(NUM_SAMPLES)] for t in range(NUM_PROMPTS)
    )
    assert {group.rewards for group in groups} == {(0.0, 1.0)}


class TestResume:
    @every_rule
    @pytest.mark.parametrize("async_steps", [0, 2])
    def test_resumed_conductor_continues_at_any_step(
        self, async_steps: int, rules: tuple[str, ...]
    ) -> None:
        words = ("--async_steps", f"{async_steps}", *rules)
        states, whole = [], []
        with conductor(*words) as (it, pool):
            for step in range(1, NUM_STEPS + 1):
                whole += compositions(walk(it, pool, range(step, step + 1)))
                states.append(it.state_dict())
        for step, state in enumerate(states, start=1):
            with (
                BusyPool(seed=step) as pool,
                conductor(*words, pool=pool, state=state, start=step) as (it, _),
            ):
                assert compositions(walk(it, pool, range(step + 1, NUM_STEPS + 1))) == whole[step:]

    @settings(max_examples=num_examples(20))
    @given(num_steps=st.integers(0, 4), async_steps=st.integers(0, 3), order=st.integers(0, 2**32))
    def test_asks_the_tickets_that_were_not_consumed_first(
        self, num_steps: int, async_steps: int, order: int
    ) -> None:
        words = ("--async_steps", f"{async_steps}", "--active_sampling")
        with BusyPool(order) as pool, conductor(*words, pool=pool) as (it, _):
            batches = list(walk(it, pool, range(1, num_steps + 1)))
            state = it.state_dict()
            asked = {request.request_id: request for request in pool.requests}
        consumed = [group.ticket for batch in batches for group in (*batch.groups, *batch.rejected)]
        unconsumed = [ticket for ticket, _ in state["unconsumed"]]
        # None twice, and none left out.
        assert sorted(consumed) + unconsumed == list(range(len(consumed) + len(unconsumed)))
        with conductor(*words, pool=FakePool(), state=state, start=num_steps) as (_, pool):
            assert pool.requests == [
                asked[f"{ticket}/{i}"] for ticket in unconsumed for i in range(NUM_SAMPLES)
            ]
        with conductor(*words, state=state, start=None) as (it, _):
            assert it.state_dict() == state


class TestInFlight:
    def test_part_of_the_next_step_goes_out_where_so_many_prompts_may_be_ahead(self) -> None:
        words = ("--async_steps", "2", "--prompts_ahead", "1")
        with conductor(*words, pool=FakePool(), num_steps=3) as (it, pool):
            for step, num_prompts in enumerate((1, 2, 3), start=1):
                num_ahead = 1 if step < 3 else 0
                assert len(pool.requests) == (num_prompts * NUM_PROMPTS + num_ahead) * NUM_SAMPLES
                pool.finish_all()
                next_batch(it, step)
                it.weights_published(step)
            assert len(pool.requests) == 3 * NUM_PROMPTS * NUM_SAMPLES

    @pytest.mark.parametrize("async_steps", [0, 1, 2])
    def test_next_step_goes_out_when_weights_are_published(self, async_steps: int) -> None:
        size = NUM_PROMPTS * NUM_SAMPLES
        with conductor("--async_steps", f"{async_steps}", pool=FakePool()) as (it, pool):
            assert len(pool.requests) == (async_steps + 1) * size
            pool.finish_all()
            next_batch(it)
            assert len(pool.requests) == (async_steps + 1) * size
            it.weights_published(1)
            assert len(pool.requests) == (async_steps + 2) * size

    @every_rule
    @pytest.mark.parametrize("async_steps", [0, 1, 2])
    def test_no_token_is_staler_than_the_steps_that_may_be_out(
        self, async_steps: int, rules: tuple[str, ...]
    ) -> None:
        """And no more completions are asked for at once."""
        words = ("--async_steps", f"{async_steps}", *rules)
        staleness = []
        with conductor(*words) as (it, pool):
            for step, batch in enumerate(walk(it, pool, range(1, 8)), start=1):
                learned = training_samples(
                    batch, config=config_of(*words).rollout, version=step - 1
                )
                staleness.append(learned.metrics["staleness/max"])
        assert max(staleness) <= async_steps
        assert pool.most_pending <= (async_steps + 1) * NUM_PROMPTS * NUM_SAMPLES
        if "--active_sampling" not in rules:
            # The oldest weights that may have made a token are exactly that old: the bound is no
            # looser than it is.
            assert staleness == [min(step, async_steps) for step in range(7)]

    def test_prompts_are_not_asked_for_steps_after_the_last(self) -> None:
        with conductor("--async_steps", "2", num_steps=4) as (it, pool):
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
        with conductor("--async_steps", "1", rule=slow, pool=FakePool()) as (it, pool):
            assert it.stats() == {"in_flight": 2 * size, "verifying": 0, "waiting": 0}
            for _ in range(size):
                pool.finish()
            assert judging.wait(STALL_TIMEOUT_S)
            assert it.stats() == {"in_flight": size, "verifying": size, "waiting": 0}
            judged.set()
            next_batch(it)
            it.weights_published(1)
            assert it.stats() == {"in_flight": 2 * size, "verifying": 0, "waiting": 0}


class TestSparePrompts:
    def test_slowest_are_not_waited_for_and_given_up_before_they_are_stale(self) -> None:
        words = ("--num_spare_prompts", "2", "--async_steps", "0")
        with conductor(*words, pool=FakePool()) as (it, pool):
            asked = list(pool.pending)
            assert len(asked) == (NUM_PROMPTS + 2) * NUM_SAMPLES
            late = [
                future
                for request, _, future in asked
                if request.request_id.startswith(("0/", "3/"))
            ]
            pool.pending = [each for each in asked if each[2] not in late]
            pool.finish_all()
            batch = next_batch(it)
            assert [group.ticket for group in batch.groups] == [1, 2, 4]
            assert batch.num_given_up == 2 and all(future.cancelled() for future in late)
            it.weights_published(1)
            tickets = {int(request.request_id.split("/")[0]) for request, _, _ in pool.pending}
            assert tickets == set(range(5, 10))

    @pytest.mark.parametrize("async_steps", [0, 1, 2])
    def test_no_token_is_staler_than_without_any(self, async_steps: int) -> None:
        words = ("--async_steps", f"{async_steps}", "--num_spare_prompts", "2", "--active_sampling")
        with conductor(*words, num_steps=12) as (it, pool):
            tickets: list[int] = []
            for step, batch in enumerate(walk(it, pool, range(1, 13)), start=1):
                learned = training_samples(
                    batch, config=config_of(*words).rollout, version=step - 1
                )
                assert learned.metrics["staleness/max"] <= async_steps
                assert learned.metrics["num_given_up_groups"] == batch.num_given_up
                tickets += [group.ticket for group in (*batch.groups, *batch.rejected)]
            assert len(set(tickets)) == len(tickets)
            assert it.state_dict()["unconsumed"] == []


class TestActiveSampling:
    def test_gives_up_where_nothing_can_be_learned(self) -> None:
        sentence = r"--active_sampling rejected \d+ groups of step 1.* mean is 1\)"
        with (
            conductor("--active_sampling", rule=lambda *_: 1.0) as (it, pool),
            pytest.raises(RunError, match=sentence),
        ):
            next_batch(it)
        assert len(pool.requests) <= (MAX_REJECTED_PER_PROMPT + 2) * NUM_PROMPTS * NUM_SAMPLES

    def test_gives_up_at_once_where_no_verdict_is_a_real_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = Verdict(reward=0.0, scores={"fake": 0.0}, problems=("fake: KeyError: 'x'",))
        monkeypatch.setattr(
            FakeReward, "judge", lambda _, prompt, completions: [broken] * len(completions)
        )
        sentence = r"verdicts of a step failed.*fake: KeyError"
        with conductor("--active_sampling") as (it, pool), pytest.raises(RunError, match=sentence):
            next_batch(it)
        assert len(pool.requests) <= 4 * NUM_PROMPTS * NUM_SAMPLES


class TestNoResampling:
    def test_solved_rows_are_not_drawn_again(self) -> None:
        solved = {0, 2, 5}

        def rule(prompt: Prompt, completion: Completion) -> float:
            return 1.0 if prompt.row_id in solved else coin(prompt, completion) / 2

        with conductor("--no_resampling_pass_rate", "1.0", rule=rule) as (it, pool):
            groups = [group for batch in walk(it, pool, range(1, 12)) for group in batch.groups]
        for row in solved:
            tickets = [group.ticket for group in groups if group.prompt.row_id == row]
            step = tickets[0] // NUM_PROMPTS + 1
            # When that step's batch was complete, one more step's tickets were out already.
            assert max(tickets) < (step + 1) * NUM_PROMPTS
        unsolved = [group.prompt.row_id for group in groups if group.prompt.row_id not in solved]
        assert min(map(unsolved.count, set(unsolved))) >= 3

    def test_share_that_counts_as_solved(self) -> None:
        # One of two completions is right in every group, so a rate of a half excludes each row once
        # it was asked.
        def rule(prompt: Prompt, completion: Completion) -> float:
            return float(completion.seed in first_seeds)

        first_seeds = {make_sampling_seed(SEED, ticket, 0) for ticket in range(100)}
        words = ("--async_steps", "0", "--no_resampling_pass_rate")
        with conductor(*words, "0.51", rule=rule, num_rows=3) as (it, pool):
            rows = [
                group.prompt.row_id
                for batch in walk(it, pool, range(1, 3))
                for group in batch.groups
            ]
        assert sorted(rows) == [0, 0, 1, 1, 2, 2]
        with (
            conductor(*words, "0.5", rule=rule, num_rows=3) as (it, pool),
            pytest.raises(RunError, match="all 3 prompts"),
        ):
            list(walk(it, pool, range(1, 3)))


class TestFailure:
    def test_failure_of_engines_is_raised_while_verifiers_hang(self) -> None:
        came = threading.Event()

        def hang(prompt: Prompt, completion: Completion) -> float:
            assert came.wait(STALL_TIMEOUT_S)
            return 0.0

        with conductor("--async_steps", "5", rule=hang, pool=FakePool()) as (it, pool):
            for _ in range(20):  # more than threads that judge
                pool.finish()
            pool.finish(error=RunError("no engine is left"))
            with pytest.raises(RunError, match=r"^no engine is left$"):
                it.next_batch(1, timeout_s=3)
            came.set()

    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit("bad")], ids=["error", "exit"])
    def test_failure_of_a_verifier_names_the_completion(self, error: BaseException) -> None:
        def broken(prompt: Prompt, completion: Completion) -> float:
            raise error

        with conductor(pool=FakePool(), rule=broken) as (it, pool):
            row = it.state_dict()["unconsumed"][0][1]
            pool.finish()
            message = (
                rf"completion 0/0 \(row {row}\) could not be judged: {type(error).__name__}: bad"
            )
            with pytest.raises(RunError, match=message):
                next_batch(it)

    def test_failure_of_learners_ends_the_wait_while_completions_arrive(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("open_instruct.rl.conductor.CHECK_INTERVAL_S", 0.01)
        lost, checks = RunError("rank 1 was lost"), []
        with conductor("--async_steps", "5", pool=FakePool()) as (it, pool):

            def check() -> None:
                checks.append(pool.finish(-1))  # of other groups than the first
                if len(checks) == 3:
                    raise lost

            with pytest.raises(RunError) as caught:
                it.next_batch(1, check=check, timeout_s=STALL_TIMEOUT_S)
        assert caught.value is lost and len(checks) == 3

    def test_failure_of_learners_is_noticed_between_fast_groups(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("open_instruct.rl.conductor.CHECK_INTERVAL_S", 0.2)
        checked = threading.Event()
        with conductor("--async_steps", "0", pool=FakePool()) as (it, pool):

            def finish_slowly() -> None:
                while pool.pending:
                    time.sleep(0.08)  # a group takes 0.16 s, the step 0.48
                    pool.finish()

            engines = threading.Thread(target=finish_slowly)
            engines.start()
            it.next_batch(1, check=checked.set, timeout_s=STALL_TIMEOUT_S)
            engines.join()
        assert checked.is_set()

    def test_timeout_names_what_is_waited_for(self) -> None:
        with conductor("--async_steps", "1", pool=FakePool()) as (it, pool):
            pool.finish()
            with pytest.raises(RunError) as caught:
                it.next_batch(1, timeout_s=0.2)
        message = str(caught.value)
        assert "0.2 s while ticket 0 (row " in message
        assert (
            "waited for 1 of its 2. Tickets up to 5 are out: 11 completions with the engines, 0 "
            "with the"
        ) in message

    def test_completion_after_closing_is_dropped(self) -> None:
        judged = []

        def rule(prompt: Prompt, completion: Completion) -> float:
            judged.append(completion)
            return 0.0

        with conductor(pool=FakePool(), rule=rule) as (it, pool):
            random.Random(0).shuffle(pool.pending)
        pool.finish_all()
        assert not judged
        assert it.stats()["verifying"] == 0
