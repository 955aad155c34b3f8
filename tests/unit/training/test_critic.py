"""What a critic makes of rewards: advantages of sampled tokens alone, over many turns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from open_instruct.batching.rollouts import (
    build_rollout_batch,
    build_rollout_minibatches,
    count_denominators,
    plan_steps_of_ranks,
)
from open_instruct.checkpoints.parts import as_metadata, names_of_part
from open_instruct.config.policy_sections import CriticSection
from open_instruct.core.batch_values import RLValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Batch, Document, Episode, RolloutSample, Span, StepBatch
from open_instruct.objectives.objective import TokenLogprobs
from open_instruct.rl.samples import add_answer_loss
from open_instruct.training.checkpoint_parts import CriticPart
from open_instruct.training.critic import Critic, ValueLoss, select_critic_part

GAMMA, LAMBDA = 0.9, 0.8
EPISODE = RolloutSample(
    document=Document(
        token_ids=(1, 2, 3, 4, 5, 6, 7, 8), responses=(Span(start=2, stop=4), Span(start=6, stop=8))
    ),
    engine_logprobs=(0.0,) * 4,
    advantage=2.0,
)
SHORT = RolloutSample(
    document=Document(token_ids=(1, 2, 9), responses=(Span(start=2, stop=3),)),
    engine_logprobs=(0.0,),
    advantage=-1.0,
)
WRITTEN = RolloutSample(
    document=Document(token_ids=(1, 2, 5, 6), responses=(Span(start=2, stop=4),)),
    engine_logprobs=(0.0, 0.0),
    advantage=0.0,
    weights={"rl": (0.0, 0.0), "ce": (1.0, 1.0), "kl": (0.0, 0.0)},
)


def valued(batch: Batch) -> TokenLogprobs:
    """A critic that says of each label a tenth of its place among them, more for later
    microbatches.
    """
    ids_N = batch.packed.sequence_ids_N
    return TokenLogprobs(
        logprobs_N=torch.arange(len(ids_N)) / 10 + float(ids_N.sum()), sequence_ids_N=ids_N
    )


def critic_of(**flags: Any) -> Critic:
    critic = object.__new__(Critic)
    critic.flags = CriticSection(gamma=GAMMA, gae_lambda=LAMBDA, **flags)
    backend = SimpleNamespace(set_mode=lambda mode: None)
    policy: Any = SimpleNamespace(
        backend=backend, score=valued, model=torch.nn.Linear(1, 1), dp_process_group=None
    )
    policy.device = torch.device("cpu")
    critic.policy = policy
    return critic


def update_of(*microbatches: list[RolloutSample]) -> StepBatch:
    batches = tuple(build_rollout_batch(samples) for samples in microbatches)
    counts = count_denominators([each for samples in microbatches for each in samples])
    return StepBatch(microbatches=batches, counts=counts | {"rl_microbatches": len(batches)})


def test_advantages_are_of_sampled_tokens_alone_over_all_turns() -> None:
    replies = (Span(start=0, stop=2), Span(start=4, stop=6))
    episode = Episode(status="done", replies=replies, turns=(), answers=(Span(start=2, stop=4),))
    completion: Any = SimpleNamespace(token_ids=EPISODE.document.token_ids[2:], episode=episode)
    update = update_of([add_answer_loss(EPISODE, completion, 0.5), SHORT, WRITTEN])
    (filled,) = critic_of(whiten_advantages=False).add_advantages([update])
    values = RLValues.read(filled.microbatches[0].values)
    old = valued(update.microbatches[0]).logprobs_N
    sampled = [0, 1, 4, 5]  # of the episode's labels: two more are what the environment answered
    expected, later, value_later = torch.zeros(9), 0.0, 0.0
    for place in reversed(sampled):
        delta = (2.0 if place == 5 else 0.0) + GAMMA * value_later - float(old[place])
        expected[place] = later = delta + GAMMA * LAMBDA * later
        value_later = float(old[place])
    expected[6] = -1.0 - float(old[6])
    is_sampled = torch.zeros(9)
    is_sampled[[*sampled, 6]] = 1
    assert torch.allclose(values.advantages_N, expected, atol=1e-6)
    assert values.old_values_N is not None and values.returns_N is not None
    assert torch.allclose(values.old_values_N, old * is_sampled)
    assert torch.allclose(values.returns_N, expected + old * is_sampled, atol=1e-6)


def test_whitening_is_over_all_updates_of_a_step() -> None:
    updates = [update_of([EPISODE], [SHORT]), update_of([SHORT, EPISODE])]
    filled = critic_of().add_advantages(updates)
    everything = torch.cat(
        [RLValues.read(batch.values).advantages_N for each in filled for batch in each.microbatches]
    )
    assert len(everything) == 10
    assert float(everything.mean()) == pytest.approx(0, abs=1e-6) and float(
        everything.std()
    ) == pytest.approx(1)


def test_microbatches_of_conversations_are_not_computed() -> None:
    """Neither for values nor to learn.

    Of the completions every rank computes as many, the empty ones too.
    """
    samples = [EPISODE, SHORT, EPISODE, *[WRITTEN] * 3]
    sizes: dict[str, Any] = {"max_tokens_per_microbatch": 8, "num_mini_batches": 1}
    ranks = [
        build_rollout_minibatches(work)
        for work in plan_steps_of_ranks(samples, num_ranks=2, **sizes)
    ]
    critic, computed = critic_of(whiten_advantages=False), list[Batch]()

    def noted(batch: Batch) -> TokenLogprobs:
        computed.append(batch)
        return valued(batch)

    critic.policy.score = noted  # type: ignore[method-assign, assignment]
    for updates in ranks:
        computed.clear()
        filled = critic.add_advantages(updates)
        assert [len(each.microbatches) for each in filled] == [3]
        assert len(computed) == 2
        assert filled[0].microbatches[2] is updates[0].microbatches[2]
        assert [len(select_critic_part(each).microbatches) for each in filled] == [2]
        learned = select_critic_part(filled[0]).microbatches
        assert all(RLValues.read(each.values).returns_N is not None for each in learned)
    assert sorted(
        len(RLValues.read(batch.values).advantages_N)
        for (update,) in ranks
        for batch in update.microbatches[:2]
    ) == [*(0, 1, 4, 4)]


def test_step_without_completions_leaves_the_critic_alone() -> None:
    critic = critic_of()
    (filled,) = critic.add_advantages([update_of([WRITTEN], [])])
    assert select_critic_part(filled).counts["rows"] == 0
    for batch in filled.microbatches:
        outputs = ValueLoss(clip=0.2).compute(valued(batch), batch, filled.counts)
        assert outputs.loss == 0 and outputs.metrics.keys() == {"loss"}


def test_checkpoint_without_a_critic_is_refused() -> None:
    names = ["model.a", "optim.a", "critic.model.a", "critic.optim.a"]
    of_critic = names_of_part("critic", names)
    assert of_critic == ["model.a", "optim.a"]
    module: Any = SimpleNamespace(
        state_dict_to_load=lambda saved: dict.fromkeys(saved.state_dict_metadata)
    )
    assert [*CriticPart(module).state_to_load(as_metadata(of_critic))] == of_critic
    without = as_metadata(names_of_part("critic", names[:2]))
    with pytest.raises(InputError, match="are of another --advantages than gae: give theirs again"):
        CriticPart(module).state_to_load(without)
