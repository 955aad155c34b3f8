"""A GRPO run whose rows were changed since its checkpoint is refused before Ray is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from open_instruct import grpo_olmo_core_actor
from open_instruct.cluster import ray_cluster
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import EXIT_INPUT
from open_instruct.data.prompts import PromptStream
from open_instruct.rl import fleet
from open_instruct.rl.checked_run import open_rollout_run
from open_instruct.rl.run_checks import CONVERSATIONS
from tests.fleet.grpo_case import GRPOCase, write_prompts
from tests.ranks.shallow import write_shallow_model
from tests.refusals import refused
from tests.unit.checkpoints.test_saved_place import save_place


def write_chats(path: Path, reply: str) -> Path:
    turns = [{"role": "user", "content": "Number?"}, {"role": "assistant", "content": reply}]
    path.write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    return path


@pytest.fixture
def case(tmp_path: Path) -> GRPOCase:
    """A run with a checkpoint of step 1, as the driver writes its place there."""
    chats = write_chats(tmp_path / "chats.jsonl", "4 5 6")
    case = GRPOCase(
        model=write_shallow_model(tmp_path / "model", family="olmo2", is_narrow=False),
        prompts=write_prompts(tmp_path / "prompts.jsonl", 3),
        output_dir=tmp_path / "out",
        flags={
            "sft_mixer_list": [chats, "1.0"],
            "sft_rows_per_step": 1,
            "cache_dir": tmp_path / "cache",
        },
    )
    with open_rollout_run(config_of(case)) as run:
        assert run.conversations is not None
        prompts = PromptStream(run.prompts, run.config.optim.seed).state_dict()
        state: dict[str, Any] = {"step": 1, "conductor": {"prompts": prompts, "unconsumed": []}}
        state[CONVERSATIONS] = run.conversations.fingerprint
    save_place(case.output_dir, 1, {"drivers_state": state})
    return case


def config_of(case: GRPOCase) -> GRPOConfig:
    return parse_run(GRPOConfig, case.command()[1:])


@pytest.mark.slow
def test_changed_rows_are_refused_before_ray_is_started(
    case: GRPOCase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_rollout_run(config_of(case)):
        pass
    write_chats(tmp_path / "chats.jsonl", "4 5 7")
    with refused("other_run", "sft_mixer_list", "--max_seq_length", "--output_dir"):
        open_rollout_run(config_of(case)).__enter__()

    # Calling it would be a TypeError, and end with code 1.
    monkeypatch.setattr(fleet, "start_cluster", None)
    # Another test may have imported it.
    monkeypatch.setattr(ray_cluster, "refuse_imported_ray", lambda: None)
    write_prompts(tmp_path / "prompts.jsonl", 4)
    assert grpo_olmo_core_actor.main(case.command()[1:]) == EXIT_INPUT
    line = next(
        line for line in capsys.readouterr().err.splitlines() if "--dataset_mixer_list" in line
    )
    assert "--max_prompt_token_length" in line and "--overwrite_output_dir" in line
