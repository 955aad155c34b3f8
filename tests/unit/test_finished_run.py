"""The model of a run that has ended comes from its last checkpoint alone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from open_instruct.checkpoints.safe_checkpointer import write_own_files
from open_instruct.checkpoints.saved_weights import SavedWeights
from open_instruct.checkpoints.step_folder import INDEX, Manifest, begin, publish, write_manifest
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.parser import parse
from open_instruct.config.resolved import write_config
from open_instruct.errors import InputError
from open_instruct.models.box_files import Part, WrittenFile, share_out
from open_instruct.rollout.checked_run import RolloutRun, export_finished
from open_instruct.run.console import Console
from open_instruct.run.pretrained import open_pretrained
from open_instruct.run.run_directory import RunDirectory
from open_instruct.toys.tiny import write_tiny_model

NUM_STEPS = 3


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor], start_model: str) -> None:
    """As two ranks do that have the upper and the lower half of every tensor."""
    halves: list[dict[str, Part]] = [{}, {}]
    for name, whole in weights.items():
        cut = whole.shape[0] // 2
        for rank, (start, local) in enumerate(((0, whole[:cut]), (cut, whole[cut:]))):
            places = (start, *[0] * (whole.dim() - 1))
            halves[rank][f"model.{name}"] = Part(local=local.clone(), start=places, shape=tuple(whole.shape))
    index = share_out([{name: part.claim for name, part in half.items()} for half in halves])
    part = begin(folder)
    files: dict[str, WrittenFile] = {}
    for rank, half in enumerate(halves):
        documents: dict[str, Any] = {INDEX: {"tensors": index, "values": {}}} if rank == 0 else {}
        files |= write_own_files(part, rank, {name: each.local for name, each in half.items()}, documents)
    write_manifest(part, Manifest(step=int(folder.name[4:]), num_ranks=2, start_model=start_model, files=files))
    publish(part, folder)


@pytest.fixture
def run(tmp_path: Path) -> RolloutRun:
    model = write_tiny_model(tmp_path / "model", family="olmo2", size="tiny")
    config = parse(
        GRPOConfig,
        [
            *("--model_name_or_path", str(model), "--dataset_mixer_list", "rows.jsonl", "1.0"),
            *("--output_dir", str(tmp_path / "out"), "--total_episodes", str(64 * NUM_STEPS)),
        ],
    )
    assert config.num_steps == NUM_STEPS
    directory = RunDirectory(path=tmp_path / "out")
    directory.create()
    write_config(config, directory.config, {}, command="grpo")
    pretrained = open_pretrained(config, directory.hf_model)
    settings = {"config": config, "directory": directory, "pretrained": pretrained, "console": Console(speaks=True)}
    return cast(RolloutRun, SimpleNamespace(**settings))


def trained(run: RolloutRun) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = run.pretrained.build(init_device="meta")
    return {name: torch.randn(each.shape, generator=generator) for name, each in model.named_parameters()}


def test_it_is_the_checkpoint_tensor_by_tensor(run: RolloutRun, capsys: pytest.CaptureFixture[str]) -> None:
    weights = trained(run)
    step = run.directory.path / f"step{NUM_STEPS}"
    write_checkpoint(step, weights, run.pretrained.fingerprint)
    assert set(SavedWeights(step, {name: tuple(each.shape) for name, each in weights.items()})) == set(weights)
    assert export_finished(run)
    assert f"all {NUM_STEPS} steps were taken: exporting the model of" in " ".join(capsys.readouterr().out.split())
    exported = load_file(run.directory.hf_model / "model.safetensors")
    names = dict(run.pretrained.names)
    assert len(exported) == len(weights)
    for name, whole in weights.items():
        assert torch.equal(exported[names[name]], whole)
    assert json.loads((run.directory.hf_model / "config.json").read_text())["model_type"] == "olmo2"


def test_learners_are_needed_for_the_rest(run: RolloutRun) -> None:
    assert not export_finished(run)  # nothing was learned yet
    weights, own = trained(run), run.pretrained.fingerprint
    write_checkpoint(run.directory.path / f"step{NUM_STEPS - 1}", weights, own)
    assert not export_finished(run)  # one step is left
    last = run.directory.path / f"step{NUM_STEPS}"
    write_checkpoint(last, weights, own)
    damaged = bytearray((last / "rank1.safetensors").read_bytes())
    damaged[-1] ^= 1
    (last / "rank1.safetensors").write_bytes(damaged)
    assert not export_finished(run)  # they go around it
    write_checkpoint(last, weights, own)
    for section, name, value in (("lora", "use_lora", True), ("run", "export_dtype", "float16")):
        before = getattr(getattr(run.config, section), name)
        setattr(getattr(run.config, section), name, value)
        assert not export_finished(run)
        setattr(getattr(run.config, section), name, before)
    assert not run.directory.hf_model.exists()


def test_a_start_model_that_was_changed_is_refused(run: RolloutRun) -> None:
    write_checkpoint(run.directory.path / f"step{NUM_STEPS}", trained(run), "another's")
    with pytest.raises(InputError, match="the start model is not the one"):
        export_finished(run)
