"""What a replay may be asked for, and the weights that it chooses."""

from dataclasses import replace
from pathlib import Path

import pytest

from open_instruct.commands.replay import (
    Replay,
    ReplayFlags,
    apply_run_plan,
    describe_differences,
    find_start_weights,
    format_table,
    list_replay_flags,
    parse_replay,
    read_recorded_row,
)
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import list_flags
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.policy_sections import CriticSection
from open_instruct.config.resolved import as_flat_dict, write_config
from open_instruct.core.errors import InputError
from open_instruct.objectives.sft import SFTConfig
from open_instruct.parallel.resolve import reduce_to_one_process
from open_instruct.run.run_directory import RunDirectory

REQUIRED = ["--model_name_or_path", "start", "--dataset_mixer_list", "prompts.jsonl", "1.0"]
LARGE = [
    "--num_learners_per_node",
    "8",
    "8",
    "--tensor_parallel_degree",
    "2",
    "--fsdp_shard_degree",
    "4",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on 16 GPUs, with checkpoints of steps 2 and 4."""
    folder = tmp_path / "run"
    for step in (2, 4):
        (folder / f"step{step}").mkdir(parents=True)
        (folder / f"step{step}" / "checkpoint.json").touch()
    compiled = ["--compile_model", "--activation_memory_budget", "0.5", "--active_sampling"]
    words = [*REQUIRED, "--output_dir", str(folder), *LARGE, *compiled, "--clip_higher", "0.3"]
    write_config(parse_run(GRPOConfig, words), folder / "config.yaml", command="grpo")
    return folder


def asked(run: Path, *words: str) -> Replay:
    return parse_replay([str(run), "--step", "3", *words])


def refusal(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_replay(words)
    return str(caught.value)


def test_replay_keeps_the_settings_of_the_run(run: Path) -> None:
    replay = asked(run)
    assert (replay.run, replay.config.replay, replay.changes) == (run, ReplayFlags(step=3), {})
    assert replay.settings.loss.clip_higher == 0.3


def test_replay_repeats_the_choices_of_the_plan(run: Path) -> None:
    """A run has written what --activation_checkpointing auto came to; without a plan everything was
    kept.
    """
    settings, directory = asked(run).settings, RunDirectory(path=run)
    assert settings.memory.activation_checkpointing == "auto"
    assert apply_run_plan(settings, directory).memory.activation_checkpointing == "none"
    directory.write_plan({"phases": [], "activation_checkpointing": "full"})
    assert apply_run_plan(settings, directory).memory.activation_checkpointing == "full"
    said = replace(settings, memory=replace(settings.memory, activation_checkpointing="offload"))
    assert apply_run_plan(said, directory).memory.activation_checkpointing == "offload"


def test_only_what_is_another_value_is_a_change(run: Path) -> None:
    replay = asked(
        run,
        "--clip_higher",
        "0.3",
        "--loss_fn",
        "dapo",
        "--temperature=0.5",
        "--no-filter-zero-std-samples",
    )
    assert replay.changes == {"temperature": (1.0, 0.5), "filter_zero_std_samples": (True, False)}
    now, before = as_flat_dict(replay.config), as_flat_dict(replay.settings)
    # Rejected groups are not replayed, so active sampling does not stand against keeping all
    # groups.
    assert {name for name in before if now[name] != before[name]} == {
        *replay.changes,
        "active_sampling",
    }
    assert asked(run, "--clip_higher", "0.3").changes == {}


def test_other_advantages_need_no_critic(run: Path) -> None:
    words = [
        *REQUIRED,
        "--output_dir",
        str(run),
        "--advantages",
        "gae",
        "--critic_learning_rate",
        "1e-3",
    ]
    write_config(parse_run(GRPOConfig, words), run / "config.yaml", command="grpo")
    assert asked(run).settings.critic.critic_learning_rate == 1e-3
    assert asked(run, "--advantages", "rloo").config.critic == CriticSection()


def test_every_flag_of_the_loss_may_differ(run: Path) -> None:
    of_loss = {name for name, flag in list_flags(GRPOConfig).items() if flag.section == "loss"}
    assert of_loss < list_replay_flags()
    assert {
        "advantage_normalization_type",
        "mask_truncated_completions",
        "temperature",
    } < list_replay_flags()
    words = {"int": "2", "float": "0.5"}
    kinds = {name: flag.kind.__name__ for name, flag in list_flags(GRPOConfig).items()}
    numbers = [name for name in kinds.keys() - list_replay_flags() if kinds[name] in words]
    asked_for = [word for name in numbers for word in (f"--{name}", words[kinds[name]])]
    named, _, reason = refusal(str(run), "--step", "1", *asked_for).partition(": ")
    assert named.split(", ") == sorted(f"--{name}" for name in numbers)
    assert "a replay keeps the run's own value" in reason


def test_replay_on_one_process_has_no_shards(run: Path) -> None:
    config = reduce_to_one_process(asked(run).settings)
    assert (config.parallel.num_learners_per_node, config.parallel.tensor_parallel_degree) == (
        [1],
        1,
    )
    assert config.parallel.fsdp_shard_degree is None and not config.memory.compile_model
    assert config.memory.activation_memory_budget == 1.0
    alone = parse_run(GRPOConfig, [*REQUIRED, "--output_dir", "out", "--single_gpu_mode"])
    assert reduce_to_one_process(alone).parallel.single_gpu_mode


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--step", "3"], "the first word is the folder of the run"),
        (["RUN"], "missing: --step"),
        (["RUN", "--step", "0"], "--step 0: must be at least 1"),
        (["RUN", "--step", "two"], "--step takes a whole number, not 'two'"),
        (
            ["gone", "--step", "3"],
            "gone is not the --output_dir of a run: gone/config.yaml cannot be read",
        ),
        (
            ["RUN", "--step", "3", "--seed", "2", "--beta", "1"],
            "--seed: a replay keeps the run's own value",
        ),
        (["RUN", "--step", "3", "--loss_fm", "gspo"], "did you mean --loss_fn?"),
        (["RUN", "--step", "3", "--loss_fn", "ppo"], "--loss_fn takes one of dapo"),
        (["RUN", "--step", "3", "--rho_cap", "0.5"], "--rho_cap 0.5: must be above 1"),
        (["RUN", "--step", "3", "--weights", "gone"], "--weights gone: there is no such folder"),
        (["RUN", "--step", "3", "--json", "gone/x.json"], "--json gone/x.json"),
    ],
)
def test_replay_refuses_flags_of_the_run(run: Path, words: list[str], part: str) -> None:
    assert part in refusal(*(str(run) if word == "RUN" else word for word in words))


def test_run_of_another_kind(run: Path) -> None:
    words = [
        "--model_name_or_path",
        "start",
        "--mixer_list",
        "rows.jsonl",
        "1.0",
        "--output_dir",
        str(run),
    ]
    write_config(parse_run(SFTConfig, words), run / "config.yaml", command="sft")
    assert "is not the folder of a GRPO run, which alone can be replayed" in refusal(
        str(run), "--step", "3"
    )
    (run / "config.yaml").write_text("loss_fn: [")
    assert "config.yaml cannot be read" in refusal(str(run), "--step", "3")


@pytest.mark.parametrize(
    ("step", "checkpoint", "are_the_steps_own"),
    [
        (1, None, True),
        (2, None, False),
        (3, "step2", True),
        (4, "step2", False),
        (5, "step4", True),
        (9, "step4", False),
    ],
)
def test_weights_before_a_step(
    run: Path, step: int, checkpoint: str | None, are_the_steps_own: bool
) -> None:
    weights = find_start_weights(run, step, config=asked(run).settings, weights_folder=None)
    assert (weights.model, weights.are_the_steps_own) == ("start", are_the_steps_own)
    assert weights.checkpoint == (None if checkpoint is None else run / checkpoint)
    assert ("of another policy" in weights.description) == (not are_the_steps_own)
    assert (f"step {step} began with those of step {step - 1}" in weights.description) == (
        not are_the_steps_own
    )


def test_given_weights_overrule_checkpoints(run: Path) -> None:
    replay = asked(run, "--weights", str(run / "step2"))
    weights = find_start_weights(
        run, 3, config=replay.settings, weights_folder=replay.config.replay.weights
    )
    assert (weights.model, weights.checkpoint, weights.are_the_steps_own) == (
        str(run / "step2"),
        None,
        False,
    )


def test_row_of_a_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_recorded_row(file, 1) is None
    file.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    assert read_recorded_row(file, 2) == {"step": 2, "loss": 0.25}
    assert read_recorded_row(file, 3) is None
    file.write_text('{"step": 1, "lo')
    assert read_recorded_row(file, 1) is None  # cut short by a crash


def test_table() -> None:
    recorded, recomputed = {"loss": 0.5, "reward": 1.0}, {"loss": 0.25, "kl": 1e-7}
    lines = format_table(
        {"recorded": recorded, "recomputed": recomputed, "changed": None}
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["recorded", "recomputed"],
        ["loss", "0.5", "0.25"],
        ["kl", "-", "1e-07"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert format_table({"recorded": None, "recomputed": recomputed}).splitlines()[1].split() == [
        "loss",
        "0.25",
    ]


def test_differences() -> None:
    recorded = {"loss": 0.5, "grad_norm": 2.0}
    assert "by 0.0e+00 in loss, by 0.0e+00" in describe_differences(recorded, recorded)
    assert "by 2.5e-01 in loss, by 5.0e-01 of itself" in describe_differences(
        recorded, {"loss": 0.25, "grad_norm": 3.0}
    )
    assert "by 1.0e+00 of itself" in describe_differences(
        {"loss": 0.0, "grad_norm": 0.0}, {"loss": 0.0, "grad_norm": 1.0}
    )
