"""--keep_best of GRPO: the best step's checkpoint outlives the others, the driver that chose it,
and is exported.
"""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from open_instruct.checkpoints.step_folder import find_checkpoints
from open_instruct.commands import export
from tests.fleet.grpo_case import NUM_STEPS, TIMEOUT_S, GRPOCase, assert_no_process_left

pytestmark = pytest.mark.extended

METRIC = "eval/verifier/digits"


def test_first_of_equally_good_steps_is_exported_though_the_driver_is_killed(
    variant: Callable[..., GRPOCase],
) -> None:
    """Held-out answers stay what they are, as weights change by less than sampling sees; so the
    first step stays.
    """
    flags: dict[str, Any] = {
        "learning_rate": "1e-7",
        "lr_scheduler_type": "constant",
        "eval_split": 0.4,
    }
    flags |= {"keep_best": METRIC, "local_eval_every": 1, "eval_temperature": 0}
    case = variant(**flags, keep_last_n_checkpoints=1, checkpointing_steps=2)
    process = case.start()
    case.when_step(NUM_STEPS - 1, process, lambda: process.send_signal(signal.SIGKILL))
    process.communicate(timeout=TIMEOUT_S)
    assert not (case.output_dir / "hf_model").exists(), "killed too late to prove anything"
    assert_no_process_left(process)
    said = case.run()

    rows = case.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert len({row[METRIC] for row in rows}) == 1
    assert json.loads((case.output_dir / "best.json").read_text())["step"] == 1
    assert "resuming after step" in said and f"of step 1, the best by {METRIC}" in said
    assert [path.name for path in find_checkpoints(case.output_dir)] == ["step1", "step4"]
    models = {}
    for step in (1, NUM_STEPS):
        folder = case.output_dir.parent / f"step{step}"
        assert export.main([str(case.output_dir / folder.name), "--output_dir", str(folder)]) == 0
        models[step] = load_file(folder / "model.safetensors")
    exported = load_file(case.output_dir / "hf_model" / "model.safetensors")
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in exported.items())
    assert any(
        not torch.equal(tensor, models[NUM_STEPS][name]) for name, tensor in exported.items()
    )
