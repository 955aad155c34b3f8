"""Adapters that a run trains are in its engines after every weight sync, merged or alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from open_instruct.commands import export
from open_instruct.core.records import RolloutGroup
from open_instruct.rl.traces import read_traces
from tests.fleet.grpo_case import NUM_STEPS, GRPOCase

pytestmark = pytest.mark.extended

TOLERANCE = 1e-4


@pytest.mark.parametrize("lora_sync", ["merged", "adapter"])
def test_engine_computes_with_the_adapters_of_the_step_before_from_step_2_on(
    variant: Callable[..., GRPOCase], tmp_path: Path, lora_sync: str
) -> None:
    """By transformers: an engine's log-probs are those of the exported checkpoint before, and of
    none that is older, so each step has learned something and sent it.
    """
    case = variant(
        use_lora="true",
        lora_sync=lora_sync,
        learning_rate="1e-2",
        checkpointing_steps=1,
        keep_last_n_checkpoints=NUM_STEPS,
    )
    case.run()
    rows = case.rows()
    assert [row["step"] for row in rows] == [*range(1, NUM_STEPS + 1)]
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
    models = [open_model(case.model)]
    for step in range(1, NUM_STEPS):
        folder = tmp_path / f"after_{step}"
        words = [str(case.output_dir), "--step", str(step), "--export_dtype", "float32"]
        assert export.main([*words, "--output_dir", str(folder)]) == 0
        models.append(open_model(folder))
    for step in range(2, NUM_STEPS + 1):
        groups = list(read_traces(case.output_dir, step))
        assert {
            version for group in groups for each in group.completions for version in each.versions
        } == {step - 1}
        assert find_largest_difference(models[step - 1], groups) < TOLERANCE
        assert find_largest_difference(models[step - 2], groups) > 10 * TOLERANCE


def open_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def find_largest_difference(model: Any, groups: Sequence[RolloutGroup]) -> float:
    """Between a model's log-probs of the sampled tokens and those that the engine gave."""
    differences = [
        (read_logprobs(model, group.prompt.token_ids, each.token_ids) - torch.tensor(each.logprobs))
        .abs()
        .max()
        for group in groups
        for each in group.completions
    ]
    return float(max(differences))


@torch.no_grad()
def read_logprobs(model: Any, prompt: Sequence[int], reply: Sequence[int]) -> torch.Tensor:
    """Of the tokens of a reply, one by one: (T,)."""
    logits_TV = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(dim=-1).gather(1, torch.tensor(reply)[:, None])[:, 0]
