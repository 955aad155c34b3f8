"""`open-instruct merge`: an adapter is added to the model that it was made beside, and to no
other.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from open_instruct.commands.merge import main
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.errors import InputError
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.lora.files import BASE_FINGERPRINT, MODEL_FIELDS
from open_instruct.rewards.reward_models import ProcessRewardModel

PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("run") / "hf_model", family="llama")


def write_adapter(
    folder: Path, model: Path, *, base: str | Path, **header: str
) -> dict[str, torch.Tensor]:
    """An adapter of the model, with a head of a score; `base` is the model that its file names."""
    fields = json.loads((model / "config.json").read_text())
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["down_proj"],
        "base_model_name_or_path": str(base),
    }
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "modules_to_save": ["score"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    sizes = {"lora_A": (4, fields["intermediate_size"]), "lora_B": (fields["hidden_size"], 4)}
    matrices = {
        f"{PREFIX}model.layers.{layer}.mlp.down_proj.{name}.weight": torch.randn(
            size, generator=generator
        )
        for layer in range(fields["num_hidden_layers"])
        for name, size in sizes.items()
    }
    matrices[f"{PREFIX}score.weight"] = torch.randn(1, fields["hidden_size"], generator=generator)
    save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt", **header})
    return matrices


def test_each_matrix_has_its_product_added_and_the_head_is_the_adapters(
    model: Path, tmp_path: Path
) -> None:
    matrices = write_adapter(tmp_path / "adapter", model, base=model)
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    words = [
        "--model_name_or_path",
        str(model),
        "--adapter_name_or_path",
        str(tmp_path / "adapter"),
    ]
    assert (
        main([*words, "--output_dir", str(tmp_path / "merged"), "--export_dtype", "float32"]) == 0
    )
    merged, plain = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", model)
    )
    plain.pop("lm_head.weight", None)
    expected = {"score.weight": matrices[f"{PREFIX}score.weight"]}
    for name, tensor in plain.items():
        layer = f"{PREFIX}{name.removesuffix('.weight')}"
        product = 0
        if name.endswith("down_proj.weight"):
            product = 2 * matrices[f"{layer}.lora_B.weight"] @ matrices[f"{layer}.lora_A.weight"]
        expected[name] = tensor.float() + product
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (
        ["LlamaForSequenceClassification"],
        1,
    )
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_fields_of_a_process_reward_model_are_in_the_merged_config(
    model: Path, tmp_path: Path
) -> None:
    """Of a head of classes, and of words of the model's own head; a verifier asks for them."""
    separator = {"prm_step_separator": "\n\n", "prm_placeholder_token": None}
    for task, words in (("TOKEN_CLS", None), ("CAUSAL_LM", ["+", "-"])):
        fields = separator | {"prm_reward_tokens": words}
        adapter, merged = tmp_path / task, tmp_path / f"merged_{task}"
        matrices = write_adapter(adapter, model, base=model)
        score = matrices.pop(f"{PREFIX}score.weight")
        if words is None:
            matrices |= {
                f"{PREFIX}score.weight": score.repeat(2, 1),
                f"{PREFIX}score.bias": torch.zeros(2),
            }
        save_file(
            matrices,
            adapter / "adapter_model.safetensors",
            metadata={MODEL_FIELDS: json.dumps(fields)},
        )
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"task_type": task}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        flags = {"model_name_or_path": model, "adapter_name_or_path": adapter, "output_dir": merged}
        assert (
            main([word for name, value in flags.items() for word in (f"--{name}", str(value))]) == 0
        )
        config = json.loads((merged / "config.json").read_text())
        assert {name: config.get(name) for name in fields} == fields
        assert ProcessRewardModel(str(merged)).config["prm_step_separator"] == "\n\n"


def test_adapter_of_another_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two models of the same shapes, by what the adapter's file says; a warning where it says
    nothing.
    """
    other = write_tiny_model(tmp_path / "other", family="llama", seed=1)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    header = {BASE_FINGERPRINT: CheckpointFiles.open(model).fingerprint}
    for known, base, is_refused, is_warned in (
        ({}, model, False, True),
        (header, model, False, False),
        (header, other, True, False),
    ):
        write_adapter(adapter, model, base="us/base", **known)
        words = [
            "--model_name_or_path",
            str(base),
            "--adapter_name_or_path",
            str(adapter),
            "--output_dir",
            str(merged),
        ]
        if is_refused:
            with pytest.raises(InputError) as caught:
                main(words)
            assert caught.value.kind == "other_run" and "us/base" in str(caught.value)
        else:
            assert main(words) == 0
        assert merged.is_dir() is not is_refused
        assert ("us/base" in capsys.readouterr().err) is is_warned
        shutil.rmtree(merged, ignore_errors=True)


def test_neither_the_base_nor_the_adapter_is_written_over(model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", model, base=model)
    words = [
        "--model_name_or_path",
        str(model),
        "--adapter_name_or_path",
        str(tmp_path / "adapter"),
    ]
    for out in (model, tmp_path / "adapter"):
        before = sorted(path.name for path in out.iterdir())
        with pytest.raises(InputError):
            main([*words, "--output_dir", str(out)])
        assert sorted(path.name for path in out.iterdir()) == before
