"""What `open-instruct export` says where there is nothing to export; the rank tests hold what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from open_instruct.checkpoints.step_folder import Manifest, write_manifest
from open_instruct.config.dpo import DPOConfig
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.parser import parse
from open_instruct.config.resolved import write_config
from open_instruct.errors import InputError
from open_instruct.run.export_command import checkpoint_of, export_command, settings_of


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not the --output_dir of a run: .*config\.yaml"):
        export_command([str(tmp_path), "--output_dir", str(tmp_path / "out")])
    with pytest.raises(InputError, match="the first word is the folder of a run"):
        export_command(["--output_dir", str(tmp_path / "out")])


def test_flags_tell_of_which_command_they_are(tmp_path: Path) -> None:
    of_both = ["--model_name_or_path", "m", "--output_dir", str(tmp_path)]
    grpo, dpo = tmp_path / "grpo", tmp_path / "dpo"
    for folder, config_class, rows in ((grpo, GRPOConfig, "--dataset_mixer_list"), (dpo, DPOConfig, "--mixer_list")):
        folder.mkdir()
        write_config(parse(config_class, [*of_both, rows, "r.jsonl", "1.0"]), folder / "config.yaml")
    config, objective = settings_of(grpo)
    assert (type(config), objective) == (GRPOConfig, None)
    config, objective = settings_of(dpo)
    assert objective is not None
    assert (type(config), objective.name) == (DPOConfig, "dpo")
    with (dpo / "config.yaml").open("a") as file:
        file.write("of_another_version: 1\n")
    with pytest.raises(InputError, match="other flags than any command of this version"):
        settings_of(dpo)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no checkpoint$"):
        checkpoint_of(tmp_path, "")
    for step in (3, 10):
        (tmp_path / f"step{step}").mkdir()
        write_manifest(tmp_path / f"step{step}", Manifest(step=step, num_ranks=1, start_model="", files={}))
    assert checkpoint_of(tmp_path, "").name == "step10"
    assert checkpoint_of(tmp_path, "step3").name == "step3"
    with pytest.raises(InputError, match=r"has step3, step10, and not step4$"):
        checkpoint_of(tmp_path, "step4")


def test_a_checkpoint_may_be_named_by_its_folder(tmp_path: Path) -> None:
    words = ["--model_name_or_path", "m", "--mixer_list", "r.jsonl", "1.0", "--output_dir", str(tmp_path)]
    (tmp_path / "step3").mkdir()
    write_manifest(tmp_path / "step3", Manifest(step=3, num_ranks=1, start_model="", files={}))
    for run in (tmp_path, tmp_path / "step7"):  # the folder of a run may have any name
        run.mkdir(exist_ok=True)
        write_config(parse(DPOConfig, words), run / "config.yaml")
    out = ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(InputError, match=rf"^{tmp_path} has step3, and not step4$"):
        export_command([str(tmp_path / "step4"), *out])
    with pytest.raises(InputError, match=r"step7 has no checkpoint$"):
        export_command([str(tmp_path / "step7"), *out])
    with pytest.raises(InputError, match=r"step3 is not the --output_dir of a run"):
        export_command([str(tmp_path / "step3"), "--step", "4", *out])


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step3").mkdir()
    (tmp_path / "step3" / "checkpoint.json").write_text("{}")
    with pytest.raises(InputError, match=r"is damaged: .*; take another step of the run"):
        checkpoint_of(tmp_path, "")
