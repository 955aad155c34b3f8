"""What is learned of an agent's branches, with which advantage, as rows and as traces have it."""

from dataclasses import replace
from pathlib import Path

import pytest

from open_instruct.batching.prefixes import find_prompt_runs
from open_instruct.batching.rollouts import build_rollout_batch, count_denominators
from open_instruct.config.rollout_sections import AgentBranches
from open_instruct.core.batch_values import RLValues
from open_instruct.core.records import (
    Completion,
    Episode,
    EpisodeBranch,
    RolloutGroup,
    Span,
)
from open_instruct.report.turn_tree import write_turns
from open_instruct.rewards.verdict import build_verdict
from open_instruct.rl.samples import RolloutStepBatch, StepSamples, training_samples
from open_instruct.rl.traces import read_traces, write_traces
from tests.unit.fake_rollouts import PROMPT, grpo_config

# Three replies behind prompt (1, 40, 2): 7 8, then bridge 9, then either 5 or (this last) 6.
SHARED = EpisodeBranch(
    prompt_token_ids=(1, 40, 2),
    token_ids=(7, 8, 9, 5),
    replies=(Span(start=0, stop=2), Span(start=3, stop=4)),
    logprobs=(-0.7, -0.8, -0.5),
    versions=(0, 0, 1),
    num_shared=1,
)
APART = EpisodeBranch(
    prompt_token_ids=(1, 41),
    token_ids=(3,),
    replies=(Span(start=0, stop=1),),
    logprobs=(-0.3,),
    versions=(2,),
    agent="critic",
)


def episode(reward: float, **agents: float) -> Completion:
    return Completion(
        token_ids=(7, 8, 9, 6),
        logprobs=(-0.7, -0.8, -0.6),
        versions=(0, 0, 1),
        text="6",
        finish_reason="stop",
        seed=0,
        episode=Episode(
            status="done",
            replies=(Span(start=0, stop=2), Span(start=3, stop=4)),
            turns=(),
            rewards={"agent": reward},
            prompt_token_ids=(1, 40, 2),
            branches=(SHARED, APART),
            agent_rewards=agents,
        ),
    )


def group(*completions: Completion) -> RolloutGroup:
    config = grpo_config().reward
    prompt = replace(PROMPT, checks=())
    verdicts = [build_verdict(prompt, each, [], config) for each in completions]
    return RolloutGroup(ticket=0, prompt=prompt, completions=completions, verdicts=tuple(verdicts))


def learn(groups: RolloutGroup, branches: AgentBranches) -> StepSamples:
    words = ["--agent_branches", branches, "--advantages", "centered"]
    batch = RolloutStepBatch(groups=(groups,))
    return training_samples(batch, config=grpo_config(*words).rollout, version=2)


PAIR = group(episode(1.0), episode(0.0))


@pytest.mark.parametrize(
    ("branches", "per_token"),
    [
        ("last", {7: 0.5, 8: 0.5, 6: 0.5}),
        ("all", {7: 0.5, 8: 0.5, 6: 0.5, 5: 0.5, 3: 0.5}),
        ("advantage_shared", {7: 1 / 3, 8: 1 / 3, 6: 1 / 6, 5: 1 / 6, 3: 1 / 6}),
    ],
)
def test_every_token_has_its_advantage_once(
    branches: AgentBranches, per_token: dict[int, float]
) -> None:
    samples = learn(PAIR, branches).samples
    batch = build_rollout_batch(
        [each for each in samples if each.advantage > 0], prefix_sharing="on"
    )
    values = RLValues.read(batch.values)
    advantages_M = values.rl.weigh(values.rl.take(values.advantages_N))
    labels_M = values.rl.take(batch.packed.labels_BT.flatten()[batch.packed.label_positions_N])
    found: dict[int, float] = {}
    for token_id, advantage in zip(labels_M.tolist(), advantages_M.tolist(), strict=True):
        found[token_id] = found.get(token_id, 0.0) + advantage
    assert found == pytest.approx(per_token)


def test_branches_of_one_prompt_lie_side_by_side_and_count_once() -> None:
    learned = learn(PAIR, "all")
    documents = [each.document for each in learned.samples]
    assert [len(run) for run in find_prompt_runs(documents)] == [4, 2]
    counts = count_denominators(learned.samples)
    assert counts["rl_labels"] == 2 * 5 and counts["labels"] == 2 * 7
    assert learned.metrics["num_generated_tokens"] == 2 * 5
    assert learned.metrics["num_trained_completions"] == 2
    assert learned.metrics["episodes/branches"] == 3
    assert learned.metrics["episodes/turns"] == 4
    assert learned.metrics["staleness/mean"] == pytest.approx((4 * 2 + 2 * 2 * 1) / 10)


def test_agent_with_a_reward_of_its_own_has_an_advantage_of_its_own() -> None:
    first = episode(1.0, critic=0.0)
    second = episode(1.0, critic=1.0)
    both = group(first, second)
    assert both.rewards == (1.0, 2.0) and both.verdicts[1].scores["critic"] == 1.0
    learned = learn(both, "all")
    by_token = {(each.document.token_ids[-1], each.advantage) for each in learned.samples}
    assert by_token == {
        *((token, advantage) for token in (6, 5, 3) for advantage in (-0.5, 0.5)),
    }
    # Where its reward is the same in both, it learns nothing from what others earn.
    learned = learn(
        group(episode(1.0, critic=0.5, other=0.0), episode(1.0, critic=0.5, other=1.0)), "all"
    )
    critics = [each for each in learned.samples if each.document.token_ids[-1] == 3]
    assert [each.advantage for each in critics] == [0.0, 0.0]


def test_report_draws_the_turns_as_a_tree() -> None:
    turns = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "one\nline"},
        {"role": "branch", "content": "reply 2: goes on from 1", "after": "1"},
        {"role": "assistant", "content": "two"},
        {"role": "branch", "content": "reply 3: goes on from 2", "after": "2"},
        {"role": "assistant", "content": "three"},
        {"role": "branch", "content": "reply 4: a history of its own", "after": ""},
        {"role": "assistant", "content": "four"},
    ]
    texts = write_turns(turns, first=1)
    assert texts[0] == "[assistant]\none\nline"
    assert texts[2] == "│  [assistant]\n│  two"
    assert texts[4] == "│  │  [assistant]\n│  │  three"
    assert texts[-1] == "[assistant]\nfour"


def test_traces_have_branches_exactly(tmp_path: Path) -> None:
    batch = RolloutStepBatch(groups=(PAIR,))
    write_traces(tmp_path, 1, batch, learn(PAIR, "all"))
    assert read_traces(tmp_path, 1) == [replace(PAIR, prompt=replace(PAIR.prompt))]
