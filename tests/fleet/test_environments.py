"""Whole runs of GRPO in an environment: learners, a vLLM engine, and episodes of four turns between them."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from open_instruct.records import RolloutGroup
from open_instruct.rollout.traces import read_traces
from tests.fleet.four_turns import NUM_TURNS
from tests.fleet.grpo_case import NUM_STEPS, GRPOCase, assert_no_process_left, write_prompts
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended


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
    base.run()
    return base


def groups(case: GRPOCase) -> list[list[RolloutGroup]]:
    return [read_traces(case.output_dir, step) for step in range(1, NUM_STEPS + 1)]


def test_learner_and_engine_agree_over_all_turns_and_syncs(undisturbed: GRPOCase) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert row["episodes/turns"] == NUM_TURNS and row["episodes/done"] == 1.0
        assert row["logprob_diff/max"] < 1e-4  # engine's log-probs of sampled tokens, against the learner's
        assert row["grad_norm"] > 0


def test_what_is_learned_is_what_was_sampled(undisturbed: GRPOCase) -> None:
    tokenizer = AutoTokenizer.from_pretrained(undisturbed.model)
    header = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for step, batch in enumerate(groups(undisturbed), start=1):
        for group in batch:
            for completion in group.completions:
                assert completion.episode is not None and len(completion.replies) == NUM_TURNS
                assert set(completion.versions) == {step - 1}
                assert all(len(reply) <= 8 for reply in completion.replies)
                sampled = {at for reply in completion.replies for at in range(reply.start, reply.stop)}
                bridges = [token for at, token in enumerate(completion.token_ids) if at not in sampled]
                # The game's own text holds a header, as plain text; the template's stands between two turns once.
                assert bridges.count(header) == NUM_TURNS - 1
                assert sum(map(len, completion.replies)) == len(completion.logprobs)
        learned = [verdict.reward for group in batch for verdict in group.verdicts]
        assert any(learned)


def test_a_killed_driver_takes_all_with_it_and_the_run_goes_on_with_the_same_episodes(
    undisturbed: GRPOCase, tmp_path: Path
) -> None:
    case = replace(undisturbed, output_dir=tmp_path / "out")
    process = case.start()
    case.when_step(3, process, lambda: process.send_signal(signal.SIGKILL))
    process.communicate()
    assert_no_process_left(process)
    assert "resuming after step" in case.run()
    for ours, theirs in zip(groups(case), groups(undisturbed), strict=True):
        assert ours == theirs
    names = ("reward", "loss", "grad_norm", "num_tokens", "episodes/turns")
    assert [[row[name] for name in names] for row in case.rows()] == [
        [row[name] for name in names] for row in undisturbed.rows()
    ]


def test_two_runs_that_are_ahead_of_their_learners_are_the_same(base: GRPOCase, tmp_path: Path) -> None:
    """Weights that stay are published at a moment of wall clock, in the middle of episodes. They change nothing."""
    still = {**base.flags, "async_steps": 2, "learning_rate": 1e-46, "checkpointing_steps": 100}  # 0 in float32
    ours, theirs = (replace(base, output_dir=tmp_path / name, flags=still) for name in ("ours", "theirs"))
    for case in (ours, theirs):
        case.run()
        assert max(row["logprob_diff/max"] for row in case.rows()) < 1e-4

    def told(case: GRPOCase) -> list[tuple[object, ...]]:
        return [
            (group.ticket, [each.token_ids for each in group.completions], [each.reward for each in group.verdicts])
            for batch in groups(case)
            for group in batch
        ]

    assert told(ours) == told(theirs)
    completions = [
        each for case in (ours, theirs) for batch in groups(case) for group in batch for each in group.completions
    ]
    assert any(len(set(completion.versions)) > 1 for completion in completions), "weights came within no episode"
