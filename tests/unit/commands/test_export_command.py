"""What `open-instruct export` says where there is nothing to export; the rank tests hold what it
writes.
"""

from pathlib import Path

import pytest

from open_instruct.checkpoints.step_folder import Manifest, write_manifest
from open_instruct.commands.export import find_checkpoint, main
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import list_flags
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.resolved import write_config
from open_instruct.core.errors import InputError
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.objectives.registry import OBJECTIVES, load_objective
from open_instruct.run.saved_settings import read_settings
from tests.refusals import refused


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with refused("bad_checkpoint", "output_dir", "config.yaml"):
        main([str(tmp_path), "--output_dir", str(tmp_path / "out")])
    with refused("stray_word", None, "export"):
        main(["--output_dir", str(tmp_path / "out")])


COMMANDS = {"grpo": GRPOConfig, **{name: load_objective(name).config_class for name in OBJECTIVES}}


def wrote(folder: Path, name: str) -> Path:
    """The config.yaml of a run of the command `name`."""
    rows, more = "--dataset_mixer_list" if name == "grpo" else "--mixer_list", list[str]()
    if name == "distill":
        more = ["--teacher_model_name_or_path", "t"]
    words = [
        "--model_name_or_path",
        "m",
        "--output_dir",
        str(folder),
        rows,
        "r.jsonl",
        "1.0",
        "--seed",
        "7",
        *more,
    ]
    write_config(parse_run(COMMANDS[name], words), folder / "config.yaml", command=name)
    return folder / "config.yaml"


@pytest.mark.parametrize("name", COMMANDS)
def test_settings_of_a_run_are_read_back(name: str, tmp_path: Path) -> None:
    """Also where some flags are left out."""
    path = wrote(tmp_path, name)
    for removed in ((), ("lora_sync", "wandb_entity", "adam_epsilon", "deepspeed_zpg")):
        kept = [
            line for line in path.read_text().splitlines() if line.partition(":")[0] not in removed
        ]
        path.write_text("\n".join(kept) + "\n")
        saved = read_settings(tmp_path)
        config, objective = saved.config, saved.objective
        assert type(config) is COMMANDS[name]
        # The file can be given to its command again.
        assert parse_run(COMMANDS[name], [str(path)]).optim.seed == 7
        assert objective.name == name
        assert (config.optim.seed, config.optim.adam_epsilon) == (7, 1e-8)
        flags = list_flags(COMMANDS[name])
        assert all((flag in "".join(saved.notes)) is (flag in flags) for flag in removed)


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_lines_of_another_version_are_passed_over_and_named(name: str, tmp_path: Path) -> None:
    """A flag that is gone, and a choice that is gone where it changes nothing that is learned;
    others are refused.
    """
    path = wrote(tmp_path, name)
    whole = path.read_text() + "of_another_version: 1\n"
    path.write_text(
        whole.replace(
            "activation_checkpointing: auto", "activation_checkpointing: of_another_version_too"
        )
    )
    (note,) = read_settings(tmp_path).notes
    assert (
        "`of_another_version: 1`" in note
        and "of_another_version_too" in note
        and "(its default" in note
    )
    path.write_text(whole.replace("optimizer: adamw", "optimizer: sgd"))
    with pytest.raises(InputError) as caught:
        read_settings(tmp_path)
    assert (caught.value.kind, caught.value.flag) == ("bad_value", "optimizer")
    with refused("unknown_flag", "of_another_version"):
        parse_run(COMMANDS[name], [str(path)])  # a command that trains refuses what it cannot read


@pytest.mark.parametrize(
    ("file", "command", "learning_rate", "lacks"),
    [
        ("grpo_2026_11_21", "grpo", 5e-7, "model_revision"),  # names no command either
        ("dpo_2026_11_23", "dpo", 5e-7, "float8_linears"),
        ("grpo_2026_11_25", "grpo", 5e-7, "float8_linears"),
    ],
)
def test_config_of_an_older_version_is_read(
    file: str, command: str, learning_rate: float, lacks: str, tmp_path: Path
) -> None:
    """As this repository's versions of those days wrote them, with a flag that has gone since."""
    text = (Path(__file__).parent / "older_runs" / f"{file}.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(text + "of_another_version: 1\n")
    saved = read_settings(tmp_path)
    assert saved.objective.name == command
    assert (saved.config.optim.learning_rate, saved.config.model.model_name_or_path) == (
        learning_rate,
        "m",
    )
    notes = "\n".join(saved.notes)
    assert lacks in notes and "of_another_version: 1" in notes
    assert (command in saved.notes[0].split()) is ("command: " not in text)


def test_export_refuses_folders_without_a_run(tmp_path: Path) -> None:
    path = wrote(tmp_path, "sft")
    path.write_text(path.read_text().replace("command: sft", "command: mine"))
    with refused("own_code", None, "mine"):
        read_settings(tmp_path)
    for text in ("- 1\n", "5\n", "{\n", "a: 1\n"):
        path.write_text(text)
        with refused("bad_checkpoint", "output_dir"):
            read_settings(tmp_path)
    path.write_text("command: sft\na: 1\n")
    with refused("missing_flag"):
        read_settings(tmp_path)


def write_step(run: Path, step: int) -> None:
    (run / f"step{step}").mkdir()
    write_manifest(run / f"step{step}", Manifest(step=step, num_ranks=1, start_model="", files={}))


def test_step_that_is_not_there_or_damaged_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with refused("missing_file", None, "no checkpoint"):
        find_checkpoint(tmp_path, "")
    for step in (3, 10):
        write_step(tmp_path, step)
    assert find_checkpoint(tmp_path, "").name == "step10"
    assert find_checkpoint(tmp_path, "step3").name == "step3"
    with refused("missing_file", None, "step3, step10", "step4"):
        find_checkpoint(tmp_path, "step4")
    (tmp_path / "step10" / "checkpoint.json").write_text("{}")
    with refused("bad_checkpoint", None, "damaged"):
        find_checkpoint(tmp_path, "")


def test_checkpoint_may_be_named_by_its_folder(tmp_path: Path) -> None:
    words = [
        "--model_name_or_path",
        "m",
        "--mixer_list",
        "r.jsonl",
        "1.0",
        "--output_dir",
        str(tmp_path),
    ]
    write_step(tmp_path, 3)
    for run in (tmp_path, tmp_path / "step7"):  # the folder of a run may have any name
        run.mkdir(exist_ok=True)
        write_config(parse_run(DPOConfig, words), run / "config.yaml", command="dpo")
    out = ["--output_dir", str(tmp_path / "out")]
    with refused("missing_file", None, f"{tmp_path}", "step3", "step4"):
        main([str(tmp_path / "step4"), *out])
    with refused("missing_file", None, "step7"):
        main([str(tmp_path / "step7"), *out])
    with refused("bad_checkpoint", "output_dir", "step3"):
        main([str(tmp_path / "step3"), "--step", "4", *out])
