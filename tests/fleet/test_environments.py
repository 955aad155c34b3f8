"""Whole runs of GRPO in an environment: learners, a vLLM engine, and episodes of four turns between
them.

One run has adapters, a critic and two learners, too: what each of them promises holds of all at
once.
"""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from open_instruct.core.records import RolloutGroup
from open_instruct.rl.traces import read_traces
from tests.fleet.four_turns import DIES_IN_TURN, NUM_TURNS, WAITS_FOR_FILE
from tests.fleet.grpo_case import (
    NUM_STEPS,
    GRPOCase,
    assert_no_process_left,
    finished,
    write_prompts,
)
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.slow

ADAPTERS: dict[str, Any] = {"use_lora": "true", "learning_rate": "5e-3", "beta": 0.05}
# Advantages of groups of one.
CRITIC: dict[str, Any] = {
    "advantages": "gae",
    "critic_learning_rate": "1e-3",
    "critic_warmup_steps": 1,
    "num_unique_prompts_rollout": 8,
    "num_samples_per_prompt_rollout": 1,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    folder = tmp_path_factory.mktemp("environments")
    return GRPOCase(
        model=write_shallow_model(folder / "model", family="olmo2", is_narrow=False),
        prompts=write_prompts(folder / "prompts.jsonl", 6),
        output_dir=folder / "out",
        flags={
            "environment": "tests.fleet.four_turns:FourTurns",
            "response_length": 160,
            "turn_length": 8,
            "max_prompt_token_length": 64,
            "checkpointing_steps": 2,
            "save_traces": "true",
        },
    )


@pytest.fixture(scope="module")
def undisturbed(base: GRPOCase) -> GRPOCase:
    case = replace(base, flags=base.flags | ADAPTERS | CRITIC | {"num_learners_per_node": 2})
    assert f"the critic is in {case.output_dir / 'critic'}" in case.run()
    return case


def groups(case: GRPOCase) -> list[list[RolloutGroup]]:
    return [read_traces(case.output_dir, step) for step in range(1, NUM_STEPS + 1)]


def test_learners_and_engine_agree_over_all_turns_and_syncs(undisturbed: GRPOCase) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert row["episodes/turns"] == NUM_TURNS and row["episodes/done"] == 1.0
    for row in rows[1:]:
        # Engine's log-probs of sampled tokens, against the learners'.
        assert row["logprob_diff/max"] < 1e-4
        assert row["grad_norm"] > 0
    # At first the critic learns alone.
    assert "policy_loss" not in rows[0] and rows[-1]["kl"] > 1e-5


def test_critic_learns_beside_the_policy(undisturbed: GRPOCase) -> None:
    assert all(row["critic/grad_norm"] > 0 for row in undisturbed.rows())
    assert "score.weight" in load_file(undisturbed.output_dir / "critic" / "model.safetensors")


def test_adapter_and_merged_model_are_left(undisturbed: GRPOCase) -> None:
    adapter = load_file(undisturbed.output_dir / "adapter" / "adapter_model.safetensors")
    assert any(values.any() for name, values in adapter.items() if "lora_B" in name)
    before = load_file(undisturbed.model / "model.safetensors")
    after = load_file(undisturbed.output_dir / "hf_model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not values.equal(before[name]) for name, values in after.items())


def test_learned_tokens_are_those_that_were_sampled(undisturbed: GRPOCase) -> None:
    tokenizer = AutoTokenizer.from_pretrained(undisturbed.model)
    header = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for step, batch in enumerate(groups(undisturbed), start=1):
        for group in batch:
            for completion in group.completions:
                assert completion.episode is not None and len(completion.replies) == NUM_TURNS
                assert set(completion.versions) == {step - 1}
                assert all(len(reply) <= 8 for reply in completion.replies)
                sampled = {
                    at for reply in completion.replies for at in range(reply.start, reply.stop)
                }
                bridges = [
                    token for at, token in enumerate(completion.token_ids) if at not in sampled
                ]
                # The game's own text holds a header, as plain text; the template's stands between
                # two turns once.
                assert bridges.count(header) == NUM_TURNS - 1
                assert sum(map(len, completion.replies)) == len(completion.logprobs)
        learned = [verdict.reward for group in batch for verdict in group.verdicts]
        assert any(learned)


@pytest.mark.extended
def test_driver_killed_within_its_episodes_takes_all_with_it_and_the_run_plays_the_same_again(
    undisturbed: GRPOCase, tmp_path: Path
) -> None:
    """In the middle of the last step: some of its tickets are played, some are under way, some are
    not begun.
    """
    case = replace(undisturbed, output_dir=tmp_path / "out")
    turns_a_step = NUM_TURNS * CRITIC["num_unique_prompts_rollout"]
    dies_in = (NUM_STEPS - 1) * turns_a_step + turns_a_step // 2
    environment = {"PYTHONPATH": str(REPOSITORY), DIES_IN_TURN: str(dies_in)}
    process = programs.start(case.command(), environment=environment, cwd=tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(case.rows()) == NUM_STEPS - 1
    assert_no_process_left(process)
    assert "resuming after step" in case.run()
    for ours, theirs in zip(groups(case), groups(undisturbed), strict=True):
        assert ours == theirs
    names = (
        "reward",
        "loss",
        "grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "num_tokens",
        "episodes/turns",
    )
    assert [[row.get(name) for name in names] for row in case.rows()] == [
        [row.get(name) for name in names] for row in undisturbed.rows()
    ]


@pytest.mark.extended
def test_two_runs_that_are_ahead_of_their_learners_are_the_same(
    base: GRPOCase, tmp_path: Path
) -> None:
    """Weights that stay are published at a moment of wall clock, in the middle of episodes, as
    those of the third step wait for the end of the first.

    They change nothing.
    """
    still = {
        **base.flags,
        "environment": "tests.fleet.four_turns:FourTurnsThatWait",
        "async_steps": 2,
        "learning_rate": 1e-46,  # 0 in float32
        "checkpointing_steps": 100,
    }
    ours, theirs = (
        replace(base, output_dir=tmp_path / name, flags=still) for name in ("ours", "theirs")
    )
    for case in (ours, theirs):
        metrics = case.output_dir / "metrics.jsonl"
        environment = {"PYTHONPATH": str(REPOSITORY), WAITS_FOR_FILE: str(metrics)}
        process = programs.start(case.command(), environment=environment, cwd=tmp_path)
        finished(process, exit_code=0)
        assert max(row["logprob_diff/max"] for row in case.rows()) < 1e-4

    def told(case: GRPOCase) -> list[tuple[object, ...]]:
        return [
            (
                group.ticket,
                [each.token_ids for each in group.completions],
                [each.reward for each in group.verdicts],
            )
            for batch in groups(case)
            for group in batch
        ]

    assert told(ours) == told(theirs)
    completions = [
        each
        for case in (ours, theirs)
        for batch in groups(case)
        for group in batch
        for each in group.completions
    ]
    assert any(len(set(completion.versions)) > 1 for completion in completions), (
        "weights came within no episode"
    )
