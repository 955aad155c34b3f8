"""A step of three streams is the same however it is cut and sharded, and what a run learned can be
replayed.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, Rows, RunRanks
from tests.ranks.launch import REPOSITORY
from tests.ranks.objective_case import write
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_grpo_step import assert_same_trajectory
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

RUN, REPLAY = "tests.ranks.jobs.replayed_run:run_it", "tests.ranks.jobs.replayed_run:replay_each"
COMPLETIONS = [9, 2]
CONVERSATIONS = 5
# Two updates a step, so that the policy at its start is another than that of the second.
CHOSEN = {"top_entropy_quantile": 0.5, "num_mini_batches": 2}
PAGE = REPOSITORY / "docs" / "losses.md"


@pytest.fixture(scope="module")
def ways(grpo_case: GRPOCase) -> dict[str, dict[str, Any]]:
    """Flags: three streams with both frozen models; and a loss that looks at all tokens of an
    update.
    """
    teacher = write_shallow_model(grpo_case.folder / "teacher", family="olmo2", seed=1)
    return {
        "streams": {
            "beta": 0.05,
            "teacher_model_name_or_path": teacher,
            "teacher_kl_coef": 0.3,
            "sft_mixer_list": ["not_read.jsonl", "1.0"],
            "sft_rows_per_step": CONVERSATIONS,
            "ce_coef": 0.5,
        },
        "chosen": CHOSEN,
    }


@pytest.fixture(scope="module")
def one_process(grpo_case: GRPOCase, ways: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    from tests.ranks.launch import run_ranks

    cuts = {
        "": ({"prefix_sharing": "off"}, {}),
        "/shared": ({"prefix_sharing": "on"}, {}),
        "/single": ({}, {"one_at_a_time": True}),
        "/accumulated": ({"pack_length": 48}, {}),
    }
    cases = {
        way + cut: case_of(grpo_case, way + cut, ways[way] | flags, **job)
        for way in ways
        for cut, (flags, job) in cuts.items()
    }
    cases["warm"] = case_of(grpo_case, "warm", ways["streams"] | {"temperature": 1.0})
    for loss_fn in ("vespo", "luspo"):
        for cut in ("", "/single"):
            cases[loss_fn + cut] = case_of(
                grpo_case, loss_fn + cut, {"loss_fn": loss_fn}, **cuts[cut][1]
            )
    return grpo_case.run(run_ranks, 1, cases)


def case_of(grpo_case: GRPOCase, name: str, flags: dict[str, Any], **job: Any) -> dict[str, Any]:
    given = CONVERSATIONS if "ce_coef" in flags else 0
    return grpo_case.case(
        f"streams_{name}".replace("/", "_"),
        flags=flags,
        completions=COMPLETIONS,
        conversations=given,
        **job,
    )


def test_every_stream_is_learned(one_process: dict[str, Rows]) -> None:
    for row in one_process["streams"]:
        parts = row["policy_loss"], row["ce"]
        assert all(abs(part) > 1e-3 for part in parts) and row["ce"] > 1
        # And two divergences.
        assert row["has_moved"] and row["loss"] > 0.5 * row["ce"] + row["policy_loss"]
    assert one_process["streams"][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(one_process["streams"][0]["teacher_kl"]) > 1e-3


def test_conversations_know_nothing_of_the_temperature_of_sampling(
    one_process: dict[str, Rows],
) -> None:
    """Their cross-entropy is that of SFT. Completions have theirs, here of 0.7 and of 1."""
    cold, warm = (one_process[name][0] for name in ("streams", "warm"))
    assert cold["ce"] == pytest.approx(warm["ce"], rel=1e-6)
    assert abs(cold["teacher_kl"] - warm["teacher_kl"]) > 1e-3


@pytest.mark.parametrize("way", ["streams", "chosen"])
@pytest.mark.parametrize("cut", ["single", "shared", "accumulated"])
def test_cutting_does_not_matter(one_process: dict[str, Rows], way: str, cut: str) -> None:
    assert_same_trajectory(one_process[f"{way}/{cut}"], one_process[way])


@pytest.mark.parametrize("loss_fn", ["vespo", "luspo"])
def test_cutting_does_not_matter_to_losses_of_whole_completions(
    one_process: dict[str, Rows], loss_fn: str
) -> None:
    assert_same_trajectory(one_process[f"{loss_fn}/single"], one_process[loss_fn])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks(
    num_ranks: int,
    grpo_case: GRPOCase,
    ways: dict[str, dict[str, Any]],
    one_process: dict[str, Rows],
    run_ranks: RunRanks,
) -> None:
    layouts = {"streams": {}, "chosen": {}} | (
        {"streams/context": {"context_parallel_degree": 2}} if num_ranks == 2 else {}
    )
    cases = {}
    for name, degrees in layouts.items():
        flags = ways[name.split("/")[0]] | degrees | {"num_learners_per_node": num_ranks}
        cases[name] = case_of(grpo_case, f"{name}_{num_ranks}", flags)
    for name, rows in grpo_case.run(run_ranks, num_ranks, cases).items():
        assert_same_trajectory(rows, one_process[name.split("/")[0]])


def test_replay(grpo_case: GRPOCase, tmp_path: Path, run_ranks: RunRanks) -> None:
    """Of a run with conversations: as it was, with another loss, and with a loss and advantages of
    one's own.
    """
    rows, own = tmp_path / "conversations.jsonl", tmp_path / "own.py"
    turns = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
    write(rows, [{"messages": [turns[0], turns[1] | {"content": str(i)}]} for i in range(7)])
    # The examples of that page, `squared` and `signs`.
    own.write_text(
        "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    )
    flags: dict[str, Any] = {
        "num_unique_prompts_rollout": 4,
        "num_samples_per_prompt_rollout": 3,
        "total_episodes": 24,
        "learning_rate": 1e-3,
        "save_traces": True,
        "sft_mixer_list": [rows, "1.0"],
        "sft_rows_per_step": 4,
        "cache_dir": tmp_path / "cache",
    }
    case = grpo_case.case("replayed_streams", flags=flags)
    run_ranks(1, RUN, flags=case["flags"], num_steps=2)
    run = grpo_case.folder / "replayed_streams"
    changes = {
        "as_it_was": [],
        "table": ["--loss_fn", "dppo_tv", "--advantages", "rloo", "--ce_coef", "0.5"],
        "own": ["--loss_fn", f"{own}:squared", "--advantages", f"{own}:signs"],
    }
    commands = [
        [str(run), "--step", "2", *words, "--json", str(tmp_path / name)]
        for name, words in changes.items()
    ]
    run_ranks(1, REPLAY, commands=commands, ports=free_ports(len(commands)))
    reports = {name: json.loads((tmp_path / name).read_text()) for name in changes}
    for report in reports.values():
        for name in ("loss", "grad_norm", "ce", "policy_loss"):
            assert report["recomputed"][name] == pytest.approx(
                report["recorded"][name], rel=1e-4, abs=1e-6
            )
    assert reports["as_it_was"]["changed"] is None
    recorded, changed = reports["table"]["recorded"], reports["table"]["changed"]
    assert changed["ce"] == pytest.approx(recorded["ce"], rel=1e-4)
    assert changed["loss"] == pytest.approx(changed["policy_loss"] + 0.5 * changed["ce"], rel=1e-4)
    # On-policy the log-ratio is 0 and every advantage 1 or -1: half a square of 1 for each token,
    # weighed by rho.
    assert reports["own"]["changed"]["policy_loss"] == pytest.approx(
        0.5 * min(2.0, reports["own"]["changed"]["rho/mean"]), rel=0.2
    )
