"""Checkpoints that are written before an optimizer's first step change no later step:

ZeRO's, and a critic's.
"""

from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase, is_computed
from tests.ranks.launch import run_ranks
from tests.ranks.test_critic import PPO
from tests.ranks.test_deepspeed_grpo import of_stage
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.checkpoints:take_steps"
# Of the first step nothing is learned: neither policy nor critic has taken a step when it is saved.
# The second warms up the critic alone.
COMPLETIONS = [0, 9, 6, 9]
WARM_UP = PPO | {"critic_warmup_steps": 2}
KINDS: dict[str, dict[str, Any]] = {
    "zero_1": of_stage(1),
    "zero_3": of_stage(3),
    "critic": WARM_UP,
    "critic_8bit": WARM_UP | {"optimizer": "adamw_8bit"},
    "critic_muon": WARM_UP | {"optimizer": "muon"},
    "critic_zero_2": WARM_UP | of_stage(2),
}


def test_saving_before_the_first_step_changes_no_later_one(grpo_case: GRPOCase) -> None:
    rows: dict[bool, list[Any]] = {}
    for saves in (False, True):
        flags = [
            grpo_case.case(f"{kind}_{saves}", flags={"num_learners_per_node": 2} | each)["flags"]
            for kind, each in KINDS.items()
        ]
        ports = free_ports(len(flags))
        rows[saves], _ = run_ranks(
            2, JOB, cases=flags, ports=ports, completions=COMPLETIONS, saves=saves
        )
    for kind, saved, undisturbed in zip(KINDS, rows[True], rows[False], strict=True):
        assert undisturbed[-1]["grad_norm"] > 0, kind
        for ours, expected in zip(saved, undisturbed, strict=True):
            names = [name for name in expected if is_computed(name)]
            assert {name: ours[name] for name in names} == {
                name: expected[name] for name in names
            }, kind
