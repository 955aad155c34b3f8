"""A real model under GRPO: learner and engine agree after every weight sync, as tiny ones do."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from open_instruct.rewards.verifier import Verifier
from tests.fleet.grpo_case import (
    NUM_PROMPTS_PER_STEP,
    NUM_SAMPLES_PER_PROMPT,
    GRPOCase,
    write_prompts,
)
from tests.unit.data.real_tokenizers import SMOLLM2, download

pytestmark = pytest.mark.extended

NUM_SYNCS = 5
NUM_EPISODES = (NUM_SYNCS + 1) * NUM_PROMPTS_PER_STEP * NUM_SAMPLES_PER_PROMPT
TOLERANCE = 1e-4


class ShareOfSpaces(Verifier):
    """How much of an answer is spaces: no two answers of a group have quite the same."""

    name: ClassVar[str] = "spaces"
    isolated = False

    def score(self, text: str, ground_truth: Any) -> float:
        return text.count(" ") / max(len(text), 1)


def test_learner_and_engine_agree_on_a_real_model_after_each_of_five_syncs(tmp_path: Path) -> None:
    """At a learning rate that moves its tokens far: a sync that is late would be seen at once."""
    case = GRPOCase(
        model=download(SMOLLM2),
        prompts=write_prompts(tmp_path / "prompts.jsonl", 22, verifiers=(ShareOfSpaces.name,)),
        output_dir=tmp_path / "out",
        flags={
            "verifier": "tests.fleet.test_real_model:ShareOfSpaces",
            "total_episodes": NUM_EPISODES,
            "max_prompt_token_length": 64,
            "response_length": 16,
            "learning_rate": "3e-5",
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0,
            "vllm_kv_cache_mib": 64,
        },
    )
    case.run()
    rows = case.rows()
    assert len(rows) == NUM_SYNCS + 1
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
