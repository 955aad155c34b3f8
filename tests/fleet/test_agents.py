"""Whole runs of GRPO whose completions are an unmodified program with OpenAI's client."""

import json
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.core.records import RolloutGroup
from open_instruct.rl.traces import read_traces
from tests.clients.environment import CLIENTS, PROGRAMS, find_python
from tests.fleet.grpo_case import (
    NUM_STEPS,
    GRPOCase,
    assert_no_process_left,
    finished,
    write_prompts,
)
from tests.fleet.openai_agent import NUM_TURNS
from tests.fleet.simulated_cluster import simulated_cluster
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended
NUM_CLIENT_STEPS = 3
FAILING_AGENT = Path(__file__).with_name("failing_agent.sh")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    folder = tmp_path_factory.mktemp("agents")
    case = GRPOCase(
        model=write_shallow_model(folder / "model", family="olmo2", is_narrow=False),
        prompts=write_prompts(folder / "prompts.jsonl", 6),
        output_dir=folder / "out",
        flags={
            "environment": "agent:tests.fleet.openai_agent:solve",
            "response_length": 160,
            "max_prompt_token_length": 64,
            "checkpointing_steps": 1,
            "save_traces": "true",
            "prefix_sharing": "on",
        },
    )
    case.run()
    return case


def groups(case: GRPOCase) -> list[RolloutGroup]:
    batches = [read_traces(case.output_dir, step) for step in range(1, NUM_STEPS + 1)]
    return [group for batch in batches for group in batch]


def test_learners_and_engine_agree_over_all_turns_and_branches(undisturbed: GRPOCase) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert row["episodes/done"] == 1.0 and row["episodes/branches"] == 2.0
        assert row["episodes/turns"] == NUM_TURNS + 1
        assert row["logprob_diff/max"] < 1e-4 and row["grad_norm"] > 0


def test_every_sampled_token_is_learned_with_the_weights_that_made_it(
    undisturbed: GRPOCase,
) -> None:
    size = len(groups(undisturbed)) // NUM_STEPS
    for number, group in enumerate(groups(undisturbed)):
        for completion in group.completions:
            assert completion.episode is not None
            (branch,) = completion.episode.branches
            assert len(branch.replies) == NUM_TURNS and branch.num_shared == 0
            assert len(completion.replies) == 1
            versions = {*completion.versions, *branch.versions}
            assert versions == {number // size}


def test_run_that_is_killed_and_goes_on_is_the_run_that_was_not(
    undisturbed: GRPOCase, tmp_path: Path
) -> None:
    case = replace(undisturbed, output_dir=tmp_path / "out")
    process = case.start()
    case.when_step(2, process, lambda: process.send_signal(signal.SIGKILL))
    process.communicate()
    assert_no_process_left(process)
    assert "resuming after step" in case.run()
    assert groups(case) == groups(undisturbed)
    names = ("reward", "loss", "grad_norm", "num_tokens", "episodes/turns")
    ours, theirs = (
        [[row[name] for name in names] for row in each.rows()] for each in (case, undisturbed)
    )
    assert ours == theirs


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster of two nodes, neither of which has room for three engines."""
    # Else whoever finds a token of Ray's in the home folder uses it, and others have none.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with simulated_cluster([{"num_cpus": 2}] * 2, environment={}) as address:
        yield address


def test_agents_beside_engines_of_two_nodes_are_those_of_one(
    undisturbed: GRPOCase, two_nodes: str, tmp_path: Path
) -> None:
    case = replace(
        undisturbed,
        output_dir=tmp_path / "out",
        flags=undisturbed.flags | {"ray_address": two_nodes, "vllm_num_engines": 3},
    )
    assert "agents run on 2 nodes with engines" in case.run()
    for row in case.rows():
        assert row["episodes/done"] == 1.0 and row["logprob_diff/max"] < 1e-4

    def describe(groups: Sequence[RolloutGroup]) -> list[Any]:
        """All but log-probs, which other batches round otherwise."""
        return [
            (group.ticket, each.token_ids, each.seed, each.episode.rewards, each.episode.turns)
            for group in groups
            for each in group.completions
            if each.episode is not None
        ]

    assert describe(groups(case)) == describe(groups(undisturbed))


def test_agents_of_four_frameworks_are_trained_for_three_steps(
    undisturbed: GRPOCase, tmp_path: Path
) -> None:
    """With random weights, of which no reply calls a tool: what each framework makes of that."""
    model = tmp_path / "model"
    shutil.copytree(undisturbed.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    prompts = tmp_path / "prompts.jsonl"
    question = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "ground_truth": "5"}
    rows = [json.dumps(question | {"client": name, "dataset": "digits"}) for name in CLIENTS]
    prompts.write_text("\n".join(rows))
    flags = {
        "environment": f"agent:{find_python()} {PROGRAMS}/with_{{client}}.py",
        "max_prompt_token_length": 12_000,  # that of smolagents has nearly so many letters
        "response_length": 64,
        # Random weights end no turn.
        "stop_strings": [*"0123456789aeiou "],
        "vllm_kv_cache_mib": 64,
        "num_unique_prompts_rollout": len(CLIENTS),
        "num_samples_per_prompt_rollout": 2,
        "total_episodes": NUM_CLIENT_STEPS * len(CLIENTS) * 2,
    }
    case = replace(
        undisturbed,
        model=model,
        prompts=prompts,
        output_dir=tmp_path / "out",
        flags=undisturbed.flags | flags,
    )
    case.run()
    assert [row["step"] for row in case.rows()] == [*range(1, NUM_CLIENT_STEPS + 1)]
    for row in case.rows():
        assert row["episodes/done"] == 1.0 and row["episodes/turns"] >= 2
        assert row["logprob_diff/max"] < 1e-4 and row["grad_norm"] > 0


NUM_OF_EACH_WAY = 16
# What an episode ends as whose agent fails so; `tests/fleet/failing_agent.sh` has them.
STATUSES = {
    "works": "done",
    "dies": "env_error",
    "hangs": "timeout",
    "floods": "env_error",
    "is_killed": "env_error",
    "speaks_no_utf8": "done",  # without a word of a reward, beside the verifier's
    "asks_for_nothing": "done",
    "leaves_others": "done",
    "leaks_its_key": "done",
    "sends_too_much": "done",
    "sends_special_tokens": "done",
    "breaks_off": "done",
    "asks_for_no_grammar": "done",
}


def test_agents_that_all_fail_in_their_ways_cost_their_own_episodes(
    undisturbed: GRPOCase, tmp_path: Path
) -> None:
    """208 of them at once, twice."""
    prompts = tmp_path / "prompts.jsonl"
    judged = {"dataset": "digits", "ground_truth": ""}
    rows = [
        {"messages": [{"role": "user", "content": way}], "way": way} | judged for way in STATUSES
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_episodes = len(STATUSES) * NUM_OF_EACH_WAY
    flags = {
        "environment": f"agent:sh {FAILING_AGENT} {{way}} {tmp_path}",
        # Far above what 208 programs need to start on a busy machine; it is waited for twice.
        "environment_timeout_s": 40,
        "agent_sampling": "follow",
        "max_turns": 64,  # of one whose key all others have
        "num_unique_prompts_rollout": len(STATUSES),
        "num_samples_per_prompt_rollout": NUM_OF_EACH_WAY,
        "total_episodes": 2 * num_episodes,
    }
    case = replace(
        undisturbed,
        prompts=prompts,
        output_dir=tmp_path / "out",
        flags=undisturbed.flags | flags,
    )
    process = case.start()
    finished(process, exit_code=0)
    assert_no_process_left(process)
    assert [row["step"] for row in case.rows()] == [1, 2]
    for step, row in enumerate(case.rows(), 1):
        assert row["grad_norm"] > 0
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for group in read_traces(case.output_dir, step):
            (way,) = (way for way in STATUSES if way in group.prompt.text)
            found[way] += Counter(each.episode.status for each in group.completions)
        assert found == {way: {status: NUM_OF_EACH_WAY} for way, status in STATUSES.items()}
