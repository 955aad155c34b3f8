"""All ranks killed within a save: whatever the phase, the layout and the states, one whole
checkpoint is found.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.grpo_case import GRPOCase
from tests.ranks.jobs.killed_saves import PHASES, WHOLE, copy_of
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_checkpoints import call as call_loads
from tests.ranks.test_checkpoints import with_layout
from tests.ranks.test_critic import PPO
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

JOB = "tests.ranks.jobs.killed_saves:save_and_copy"
ONE: dict[str, Any] = {"num_learners_per_node": 1}
FSDP_2: dict[str, Any] = {"num_learners_per_node": 2}
SPLIT: dict[str, Any] = FSDP_2 | {"expert_parallel_degree": 2}
# What is trained, the layout that is killed, and those that go on.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "critic": (PPO | {"optimizer": "adamw"}, FSDP_2, [FSDP_2, ONE]),
    "adamw_8bit": ({"optimizer": "adamw_8bit"}, FSDP_2, [FSDP_2, ONE]),
    "experts": ({"family": "qwen3_moe"}, SPLIT, [SPLIT, FSDP_2, ONE]),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_killed_within_a_save_goes_on_from_a_whole_checkpoint_under_any_layout(
    name: str, tmp_path: Path, run_ranks: Any
) -> None:
    own, killed, layouts = RUNS[name]
    flags = dict(own)
    if family := flags.pop("family", None):
        flags["model_name_or_path"] = write_shallow_model(
            tmp_path / "experts", family=family, layers=1
        )
    words = GRPOCase(tmp_path, layers=1).case("run", flags=flags)["flags"]
    output_dir = tmp_path / "run"
    of_ranks = run_ranks(2, JOB, cases=[with_layout(words, killed)], ports=free_ports(1))
    first, second = ([states[0][at] for states in of_ranks] for at in (0, 1))
    assert first[0]["tensors"] != second[0]["tensors"]
    at = words.index("--output_dir") + 1
    goes_on = list(zip(PHASES, cycle(layouts), strict=False))
    for num_ranks in (1, 2):
        wanted = [
            (phase, layout)
            for phase, layout in goes_on
            if layout["num_learners_per_node"] == num_ranks
        ]
        cases = [
            with_layout([*words[:at], str(copy_of(output_dir, phase)), *words[at + 1 :]], layout)
            for phase, layout in wanted
        ]
        for (phase, layout), found in zip(
            wanted, call_loads("load_each", num_ranks, cases), strict=True
        ):
            expected, step = (second, 2) if phase in WHOLE else (first, 1)
            for rank, theirs in enumerate(found):
                assert theirs["found"] == {"mark": step}, (phase, layout)
                assert theirs["warnings"] == []
                assert theirs["tensors"] == expected[0]["tensors"], (phase, layout)
                assert theirs["values"] == expected[0]["values"]
                if layout == killed:
                    assert theirs["random_state"] == expected[rank]["random_state"]
