"""`open-instruct merge`: an adapter is added to the model that it was made beside, and to no other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from open_instruct.cli import main
from open_instruct.models.fingerprint import weights_fingerprint
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.lora.files import BASE_FINGERPRINT
from open_instruct.toys.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("run") / "hf_model", family="olmo2")


def write_adapter(folder: Path, model: Path, *, base: str | Path, **header: str) -> dict[str, torch.Tensor]:
    """Of `model`, as the files have it; `base` is what they name."""
    fields = json.loads((model / "config.json").read_text())
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj"], "base_model_name_or_path": str(base)}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    generator = torch.Generator().manual_seed(1)
    sizes = {"lora_A": (4, fields["intermediate_size"]), "lora_B": (fields["hidden_size"], 4)}
    matrices = {
        f"base_model.model.model.layers.{layer}.mlp.down_proj.{name}.weight": torch.randn(size, generator=generator)
        for layer in range(fields["num_hidden_layers"])
        for name, size in sizes.items()
    }
    save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt", **header})
    return matrices


def test_each_matrix_has_its_product_added(model: Path, tmp_path: Path) -> None:
    matrices = write_adapter(tmp_path / "adapter", model, base=model)
    words = ["--model_name_or_path", str(model), "--adapter_name_or_path", str(tmp_path / "adapter")]
    assert main(["merge", *words, "--output_dir", str(tmp_path / "merged")]) == 0
    merged, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", model))
    prefix = "base_model.model."
    expected = {
        name: tensor + 2 * matrices[f"{prefix}{layer}.lora_B.weight"] @ matrices[f"{prefix}{layer}.lora_A.weight"]
        if (layer := name.removesuffix(".weight")).endswith("down_proj")
        else tensor
        for name, tensor in plain.items()
    }
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)


def test_an_adapter_of_another_model_is_not_merged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two models of the same shapes: by the weights of the one that it names, or by what its own file says."""
    other = write_tiny_model(tmp_path / "other", family="olmo2", seed=1)
    hub, adapter, merged = "allenai/OLMo-2-0425-1B", tmp_path / "adapter", tmp_path / "merged"
    header = {BASE_FINGERPRINT: weights_fingerprint(CheckpointFiles.open(model))}
    for named, known, base, told in (
        (other, {}, model, f"was made beside {other}, and {model} has other weights; give that model"),
        (other, {}, other, ""),
        (hub, {}, model, f"warning: {adapter} says that it was made beside {hub}"),
        (hub, header, model, ""),
        (hub, header, other, f"was made beside {hub}, and {other} has other weights"),
    ):
        write_adapter(adapter, model, base=named, **known)
        words = ["--model_name_or_path", str(base), "--adapter_name_or_path", str(adapter)]
        code, said = main(["merge", *words, "--output_dir", str(merged)]), capsys.readouterr().err
        is_refused = "other weights" in told
        assert (code, merged.is_dir()) == ((2, False) if is_refused else (0, True)), said
        assert told in said and bool(told) == bool(said)
        shutil.rmtree(merged, ignore_errors=True)
