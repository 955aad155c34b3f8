"""PPO's steps: those of one plain loop, however they are cut and sharded; stopped, gone on with,
and refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM

from open_instruct.core.records import RolloutSample
from open_instruct.models.heads.value_head import draw_score_matrix
from tests.ranks.grpo_case import GRPOCase, Rows
from tests.ranks.jobs.grpo_steps import make_samples
from tests.ranks.launch import run_ranks
from tests.ranks.test_deepspeed_grpo import JOBS as JOBS_OF_ZERO
from tests.ranks.test_deepspeed_grpo import of_stage
from tests.ranks.test_grpo_step import assert_same_trajectory
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

COMPLETIONS = [13, 3, 6]
GAMMA, LAMBDA, CLIP, CRITIC_LR, SEED = 0.98, 0.9, 0.05, 3e-4, 7
PPO: dict[str, Any] = {
    "advantages": "gae",
    "gamma": GAMMA,
    "gae_lambda": LAMBDA,
    "value_clip": CLIP,
    "critic_learning_rate": CRITIC_LR,
    "critic_warmup_steps": 1,
    "num_mini_batches": 2,
    "num_epochs": 2,
    "weight_decay": 0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "seed": SEED,
}
ALONE = {"rho_correction": "none", "prefix_sharing": "off"}
TREES = {"trees": True, "conversations": 3}
ADAPTERS = {"use_lora": True, "beta": 0.05}


def case_of(grpo_case: GRPOCase, name: str, flags: dict[str, Any], **job: Any) -> dict[str, Any]:
    return grpo_case.case(f"critic_{name}", completions=COMPLETIONS, flags=PPO | flags, **job)


@pytest.fixture(scope="module")
def one_process(grpo_case: GRPOCase) -> dict[str, Rows]:
    flags: dict[str, dict[str, Any]] = {
        "alone": ALONE,
        "beside": {"prefix_sharing": "off"},
        "beside/shared": {"prefix_sharing": "on"},
        "beside/accumulated": {"pack_length": 48},
        "beside/single_device": {"single_gpu_mode": True},
        "adapters": ADAPTERS,
    }
    cases = {
        name: case_of(
            grpo_case, name.replace("/", "_"), each, **(TREES if "beside" in name else {})
        )
        for name, each in flags.items()
    }
    return grpo_case.run(run_ranks, 1, cases)


def test_trajectory_is_that_of_one_plain_loop(
    grpo_case: GRPOCase, one_process: dict[str, Rows]
) -> None:
    rows = one_process["alone"]
    for step, (row, plain) in enumerate(zip(rows, plain_steps(grpo_case.model), strict=True)):
        assert {"policy_loss", "grad_norm"} <= row.keys() or step == 0  # the critic warms up
        assert plain.keys() <= row.keys()
        for name, value in plain.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (
                f"{name} of step {step + 1}"
            )
    assert [row["has_moved"] for row in rows] == [0, 1, 1]
    assert any(row["critic/clip_fraction"] > 0.01 for row in rows)


@pytest.mark.parametrize("cut", ["shared", "accumulated", "single_device"])
def test_cutting_does_not_matter(one_process: dict[str, Rows], cut: str) -> None:
    assert_same_steps(one_process[f"beside/{cut}"], one_process["beside"])


LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "beside/fsdp": {},
        "beside/context": {"context_parallel_degree": 2},
        "adapters/fsdp": ADAPTERS,
        "beside/zero_1": of_stage(1),
        "beside/zero_3": of_stage(3),
        "adapters/zero_3": of_stage(3) | ADAPTERS,
    },
    4: {
        "beside/hsdp": {"fsdp_shard_degree": 2},
        "beside/zero_2_context": of_stage(2, context_parallel_degree=2),
        "beside/zero_3_copied": of_stage(3, deepspeed_zpg=2, offload=True, adam_offload=True),
    },
}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_ranks_do_not_matter(
    grpo_case: GRPOCase, one_process: dict[str, Rows], num_ranks: int
) -> None:
    """Nor does the backend.

    The second step has fewer completions in a mini-batch than there are ranks.
    """
    cases = {
        name: case_of(
            grpo_case,
            f"{name.replace('/', '_')}_{num_ranks}",
            flags | {"num_learners_per_node": num_ranks},
            **(TREES if "beside" in name else {}),
        )
        for name, flags in LAYOUTS[num_ranks].items()
    }
    for name, rows in grpo_case.run(
        run_ranks, num_ranks, cases, job=f"{JOBS_OF_ZERO}:run_each"
    ).items():
        assert_same_steps(rows, one_process[name.partition("/")[0]])


def assert_same_steps(ours: Rows, theirs: Rows) -> None:
    """Of the first step the critic's metrics alone, as the policy is not trained in it."""
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    # Advantages are small differences of values and rewards.
    assert_same_trajectory(ours[1:], theirs[1:], rel=3e-5)
    for a, b in zip(ours, theirs, strict=True):
        for name in a:
            if name.startswith("critic/"):
                # Values are of size 1, and their mean is near 0.
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=5e-6), name


@pytest.mark.parametrize("backend", ["fsdp", "zero"])
def test_stopped_run_goes_on_bitwise(grpo_case: GRPOCase, backend: str) -> None:
    flags: dict[str, Any] = {"num_learners_per_node": 2, "lr_scheduler_type": "linear"}
    flags |= of_stage(2) if backend == "zero" else {"optimizer": "skip_step_adamw"}
    case, num_steps = case_of(grpo_case, f"stopped_{backend}", flags), 4
    arguments = {"flags": case["flags"], "ports": free_ports(2), "num_steps": num_steps}
    for of_rank in run_ranks(2, f"{JOBS_OF_ZERO}:stop_and_go_on", **arguments):
        rows = of_rank["rows"]
        assert rows[: num_steps // 2] == rows[num_steps // 2 :]
        assert rows[0]["critic/loss"] != rows[1]["critic/loss"]
        assert of_rank["same_weights"]


def plain_steps(folder: Path) -> list[dict[str, float]]:
    """Document by document, token by token: transformers' models, one optimizer each, and nothing
    packed.
    """
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32)
    score = torch.nn.Parameter(draw_score_matrix(trunk.config.hidden_size, seed=SEED))
    of_critic = [*trunk.parameters(), score]
    policy_steps = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0)
    critic_steps = torch.optim.AdamW(of_critic, lr=CRITIC_LR, weight_decay=0)

    def logprobs_of(sample: RolloutSample) -> torch.Tensor:
        ids, start = torch.tensor(sample.document.token_ids), sample.document.responses[0].start
        logits = policy(ids[None]).logits[0, start - 1 : -1] / 0.7
        return F.log_softmax(logits, dim=-1).gather(1, ids[start:, None])[:, 0]

    def values_of(sample: RolloutSample) -> torch.Tensor:
        ids, start = torch.tensor(sample.document.token_ids), sample.document.responses[0].start
        return trunk(ids[None]).last_hidden_state[0, start - 1 : -1] @ score[0]

    rows = []
    for step, count in enumerate(COMPLETIONS):
        samples = make_samples(count, seed=step, vocab_size=policy.config.vocab_size)
        with torch.no_grad():
            old_logprobs, old_values = (
                [logprobs_of(each) for each in samples],
                [values_of(each) for each in samples],
            )
        advantages = [
            plain_gae(values, each.advantage)
            for values, each in zip(old_values, samples, strict=True)
        ]
        returns = [a + v for a, v in zip(advantages, old_values, strict=True)]
        everything = torch.cat(advantages)
        advantages = [
            (a - everything.mean()) / (everything.var() + 1e-8).sqrt() for a in advantages
        ]
        explained = 1 - everything.var() / torch.cat(returns).var()
        half = count // 2
        told: list[dict[str, float]] = []
        for part in [range(half), range(half, count)] * 2:
            num_tokens = sum(len(returns[i]) for i in part)
            value_loss, policy_loss = torch.zeros(()), torch.zeros(())
            for i in part:
                values = values_of(samples[i])
                held = old_values[i] + (values - old_values[i]).clamp(-CLIP, CLIP)
                squares = torch.maximum((values - returns[i]) ** 2, (held - returns[i]) ** 2)
                value_loss = value_loss + 0.5 * squares.sum() / num_tokens
                ratio = (logprobs_of(samples[i]) - old_logprobs[i]).exp()
                gain = torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
                policy_loss = policy_loss - gain.sum() / num_tokens
            told.append({"critic/loss": value_loss.item()})
            told[-1]["critic/grad_norm"] = taken(critic_steps, value_loss, of_critic)
            if step > 0:
                told[-1] |= {"policy_loss": policy_loss.item()}
                told[-1]["grad_norm"] = taken(policy_steps, policy_loss, [*policy.parameters()])
        row = {name: sum(each[name] for each in told) / len(told) for name in told[0]}
        rows.append(row | {"critic/explained_variance": explained.item()})
    return rows


def plain_gae(values: torch.Tensor, reward: float) -> torch.Tensor:
    advantages, later, value_later = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        earned = reward if t == len(values) - 1 else 0.0
        later = earned + GAMMA * value_later - float(values[t]) + GAMMA * LAMBDA * later
        advantages[t], value_later = later, float(values[t])
    return advantages


def taken(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, parameters: list[torch.nn.Parameter]
) -> float:
    """Take the step; returns the gradient's norm."""
    optimizer.zero_grad()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    optimizer.step()
    return norm
