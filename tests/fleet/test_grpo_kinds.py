"""Whole runs of GRPO of every kind: models with experts, adapters, a critic, nodes and engines of
several sizes.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from open_instruct.cluster.watchdog import SHARED_MEMORY
from open_instruct.commands.model_conversion import convert_model
from open_instruct.rewards.reward_models import ProcessRewardModel, RewardModel
from open_instruct.rl.traces import read_traces
from tests.fleet.grpo_case import NUM_STEPS, GRPOCase, finished, write_prompts
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY
from tests.ranks.shallow import write_shallow_model
from tests.waiting import eventually

pytestmark = pytest.mark.extended


def test_engines_and_learners_agree_on_experts(
    variant: Callable[..., GRPOCase], tmp_path: Path
) -> None:
    """Their sizes are those of vLLM's kernel on a CPU, in which they lie in another order."""
    model = write_shallow_model(tmp_path / "model", family="qwen3_moe", is_narrow=False)
    case = variant(model_name_or_path=model, num_learners_per_node=2, total_episodes=3 * 8)
    case.run()
    rows = case.rows()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert all(1 < row["router/max_load"] < 4 for row in rows)


def test_replayed_experts_bring_learners_closer_to_engines_that_round(
    variant: Callable[..., GRPOCase], tmp_path: Path
) -> None:
    """The same completions of the same weights, with the engine's choice of experts and, where the
    step is taken again, with the learner's own.
    """
    model = write_shallow_model(tmp_path / "model", family="qwen3_moe", is_narrow=False)
    flags = {
        "vllm_dtype": "bfloat16",
        "routing_replay": "on",
        "total_episodes": 8,
        "response_length": 24,
    }
    case = variant(model_name_or_path=model, **flags)
    case.run()
    words = [
        str(REPOSITORY / "open_instruct" / "cli.py"),
        "replay",
        str(case.output_dir),
        "--step",
        "1",
    ]
    again = programs.start([*words, "--json", str(tmp_path / "again.json")], cwd=tmp_path)
    assert "here the learner chooses its own" in finished(again, exit_code=0)
    own: dict[str, float] = json.loads((tmp_path / "again.json").read_text())["recomputed"]
    (replayed,) = case.rows()
    assert "router/replayed" not in own
    assert replayed["router/replayed"] > 0.9 and replayed["router/differing"] < 0.1
    assert all(
        replayed[f"logprob_diff/{of}"] <= own[f"logprob_diff/{of}"] for of in ("mean", "max")
    )


def list_shared_memory() -> set[str]:
    """What processes of an engine keep outside themselves, in ways of vLLM's own."""
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if name.startswith(("psm_", "sem.mp-", "vllm_"))}


def test_engines_get_what_adapters_add(
    variant: Callable[..., GRPOCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added to a base of 4 bits, which is another policy than the start model that engines begin
    with; or alone, beside a base that each process of an engine rounds when it loads it. From the
    first completion on, also where a run begins with an adapter, which the engines' start model has
    not.

    An engine of two devices leaves nothing in shared memory and in the folder for temporary files.
    """
    flags = {"use_lora": "true", "use_qlora": "true", "learning_rate": "5e-3", "beta": 0.05}
    case = variant(num_learners_per_node=2, **flags)
    case.run()
    rows = case.rows()
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-5
    again = variant(
        **flags,
        adapter_name_or_path=case.output_dir / "adapter",
        lora_sync="adapter",
        vllm_tensor_parallel_size=2,
        export="adapter",
        total_episodes=16,
        dataset_mixer_eval_list=[variant().prompts, "2"],
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = list_shared_memory()
    while_it_ran: set[str] = set()
    process = again.start()
    again.when_step(1, process, lambda: while_it_ran.update(list_shared_memory()))
    said = finished(process, exit_code=0)
    own = while_it_ran - before
    assert own
    # A test beside this one may keep such things too, for a moment.
    eventually(lambda: not own & list_shared_memory(), what="something is left in shared memory")
    assert not list(tmp_path.glob("vllm_*"))
    assert (
        f"the adapter is in {again.output_dir / 'adapter'}" in said
        and "the trained model is in" not in said
    )
    rows = again.rows()
    assert len(rows) == 2 and "eval/reward" in rows[-1]
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4 and rows[0]["kl"] > 1e-5


def test_learners_on_nodes_of_two_sizes(variant: Callable[..., GRPOCase]) -> None:
    """Their sizes reach the layout as they are, and new weights reach completions that are being
    generated.
    """
    case = variant(
        num_learners_per_node=[1, 2], async_steps=1, num_mini_batches=2, vllm_num_engines=2
    )
    case.run()
    layout = json.loads((case.output_dir / "layout.json").read_text())
    assert layout["gpus_per_node"] == [1, 2] and layout["shard_groups"] == [[0], [1], [2]]
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert max(row["staleness/max"] for row in rows) == 1


@pytest.fixture(scope="module")
def reward_model(base: GRPOCase) -> Path:
    turns = [{"role": "user", "content": "Number?"}]
    pair = {
        name: [*turns, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "4 5 6"), ("rejected", "a b c"))
    }
    return train_judge(base, "reward_model", pair)


@pytest.fixture(scope="module")
def process_reward_model(base: GRPOCase) -> Path:
    step = {
        "prompt": [{"role": "user", "content": "Number?"}],
        "completions": ["4 5", "a b"],
        "labels": [True, False],
    }
    return train_judge(base, "prm", step, reward_tokens="+ -", step_separator="e")


def train_judge(base: GRPOCase, command: str, row: dict[str, Any], **more: str) -> Path:
    """A model made of a few rows by the command that its users give."""
    folder = base.output_dir.parent / command
    folder.mkdir()
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    flags = {
        "model_name_or_path": base.model,
        "mixer_list": "rows.jsonl 1.0",
        "output_dir": folder / "out",
        "max_train_steps": 2,
        "per_device_train_batch_size": 2,
        "max_seq_length": 64,
        "param_dtype": "float32",
        **more,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
    script = str(REPOSITORY / "open_instruct" / f"{command}.py")
    environment = {"PYTHONPATH": str(REPOSITORY)}
    finished(programs.start([script, *words], environment=environment, cwd=folder), exit_code=0)
    return folder / "out" / "hf_model"


def test_single_device_serves_learner_and_engine(
    variant: Callable[..., GRPOCase],
    reward_model: Path,
    process_reward_model: Path,
    tmp_path: Path,
) -> None:
    """A reward model and a process reward model judge too, a reference policy stands beside, and
    every step learns from conversations as well.

    Completions are finished before weights change, so that each is of one version.
    """
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Number?"}, {"role": "assistant", "content": "4 5 6"}]
    chats.write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    judges = {
        "reward_model": RewardModel(str(reward_model)),
        "prm": ProcessRewardModel(f"{process_reward_model},mean"),
    }
    case = variant(
        single_gpu_mode="true",
        weight_sync_backend="gloo",
        async_steps=1,
        inflight_updates="false",
        beta=0.1,
        verifier=[
            "tests.fleet.grpo_case:ShareOfDigits",
            f"reward_model:{reward_model}",
            f"prm:{process_reward_model},mean",
        ],
        num_verifier_processes=1,
        verifier_timeout_s=60,
        dataset_mixer_list=[
            write_prompts(tmp_path / "prompts.jsonl", 6, verifiers=["digits", *judges]),
            "1.0",
        ],
        sft_mixer_list=[chats, "1.0"],
        sft_rows_per_step=2,
        save_traces="true",
    )
    case.run()
    rows = case.rows()
    assert len(rows) == NUM_STEPS
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0
    assert rows[-1]["ce"] < rows[0]["ce"]
    assert all(row["num_verifier_problems"] == 0 for row in rows)
    for step in range(1, NUM_STEPS + 1):
        for group in read_traces(case.output_dir, step):
            assert all(len(set(completion.versions)) == 1 for completion in group.completions)
    assert_judged_so(case, judges)


def assert_judged_so(case: GRPOCase, judges: dict[str, RewardModel | ProcessRewardModel]) -> None:
    """Rewards are what the models say here of the completions in traces."""
    for judge in judges.values():
        judge.load()
    has_steps = False
    for step in range(1, NUM_STEPS + 1):
        for group in read_traces(case.output_dir, step):
            for completion, verdict in zip(group.completions, group.verdicts, strict=True):
                expected = {
                    name: judge.judge(
                        group.prompt.text,
                        completion.text,
                        None,
                        is_truncated=completion.is_truncated,
                    )
                    for name, judge in judges.items()
                }
                found = {name: verdict.scores[name] for name in judges}
                assert found == pytest.approx(expected, abs=1e-4)
                reward = (verdict.scores["digits"] + sum(expected.values())) / 3
                assert verdict.reward == pytest.approx(reward, abs=1e-4)
                has_steps |= expected["prm"] > 0
    assert has_steps, "no completion has a step"


def test_critic_from_a_reward_model_learns(
    variant: Callable[..., GRPOCase], reward_model: Path
) -> None:
    """It starts from a reward model, learns alone in the first step, and makes advantages of groups
    of one.
    """
    flags = {
        "critic_model_name_or_path": reward_model,
        "critic_learning_rate": "1e-3",
        "critic_warmup_steps": 1,
    }
    sizes = {
        "num_unique_prompts_rollout": 4,
        "num_samples_per_prompt_rollout": 1,
        "total_episodes": 12,
    }
    case = variant(
        advantages="gae", num_learners_per_node=2, checkpointing_steps=3, **flags, **sizes
    )
    assert f"the critic is in {case.output_dir / 'critic'}" in case.run()
    first, *others = case.rows()
    assert len(others) == 2 and "policy_loss" not in first and "zero_std_fraction" not in first
    assert all(row["grad_norm"] > 0 and row["logprob_diff/max"] < 1e-4 for row in others)
    assert all(row["critic/grad_norm"] > 0 for row in (first, *others))
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (reward_model, case.output_dir / "critic")
    )
    assert before.keys() == after.keys() and not torch.equal(
        before["score.weight"], after["score.weight"]
    )
    critic: Any = AutoModelForSequenceClassification
    assert critic.from_pretrained(case.output_dir / "critic").score.weight.shape[0] == 1
    without = sizes | {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2}
    other = replace(case, flags=variant(num_learners_per_node=2, **without).flags)
    assert "--advantage_normalization_type" in finished(other.start(), exit_code=2)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["checkpoint", "from_scratch"])
def test_run_starts_from_a_folder_of_olmo_core(
    variant: Callable[..., GRPOCase], tmp_path: Path, is_drawn: bool
) -> None:
    """Its weights on two learners, or its config.json alone; engines open what is written of it."""
    source = write_shallow_model(tmp_path / "model", family="olmo3", is_narrow=False)
    folder = tmp_path / "olmo_core"
    convert_model(source, folder, export_dtype="source")
    flags: dict[str, Any] = {"model_name_or_path": folder, "total_episodes": 2 * 8}
    if is_drawn:
        flags |= {
            "model_name_or_path": source,  # whose tokenizer it takes
            "config_name": folder / "config.json",
            "from_scratch": "true",
        }
        (source / "model.safetensors").unlink()
    case = variant(num_learners_per_node=2, **flags)
    case.run()
    rows = case.rows()
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4
    assert (case.output_dir / "engine_model" / "model.safetensors").is_file()
    assert (case.output_dir / "hf_model" / "model.safetensors").is_file()
