"""A backend that the package does not know learns from completions, and engines are sent its
weights.
"""

from pathlib import Path

import pytest

from tests.fleet.grpo_case import NUM_STEPS, GRPOCase, finished, write_prompts
from tests.plain_backend.installed import environment_with_plain
from tests.ranks import programs
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended


def test_third_backend_learns_from_completions(tmp_path: Path) -> None:
    tiny_model = write_shallow_model(tmp_path / "model", family="olmo2", is_narrow=False)
    flags = {"backend": "plain", "beta": 0.05}
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    case = GRPOCase(model=tiny_model, prompts=prompts, output_dir=tmp_path / "run", flags=flags)
    process = programs.start(
        case.command(), environment=environment_with_plain(tmp_path / "installed"), cwd=tmp_path
    )
    finished(process, exit_code=0)
    rows = case.rows()
    assert [row["step"] for row in rows] == [*range(1, NUM_STEPS + 1)]
    # The engine's log-probs are those of the weights that it was sent before each step.
    assert all(row["logprob_diff/mean"] < 1e-3 and row["grad_norm"] > 0 for row in rows)
    assert (case.output_dir / "hf_model" / "config.json").exists()
