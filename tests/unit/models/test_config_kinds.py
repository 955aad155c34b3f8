"""Config files and folders of models as other people write them: read as meant, or refused by every
command.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES, FULL, SLIDING
from open_instruct.models.build import build_model
from open_instruct.models.export import _write_config
from open_instruct.models.export_files import align_chat_templates
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.convolutions import recut_convolutions
from open_instruct.models.hf.hf_config import (
    INDEX_NAME,
    SINGLE_NAME,
    find_weights_file,
    load_hf_config,
)
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import find_parameter_shapes
from open_instruct.models.model_folder import ModelFolder, load_model_config, read_model_fields
from open_instruct.planning.subject.read_shape import model_shape, public_models
from open_instruct.run.pretrained import Pretrained
from open_instruct.run.untrained_rows import find_untrained_rows
from tests.unit.small_models import hf_config
from tests.unit.token_data import byte_tokenizer


def folder_of(tmp_path: Path, family: str, **changes: Any) -> Path:
    """A folder with the config.json of a small model; None leaves a field out."""
    fields = hf_config(family).to_dict() | {"architectures": None} | changes
    tmp_path.mkdir(exist_ok=True)
    kept = {name: value for name, value in fields.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return tmp_path


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "plan": lambda folder: model_shape(str(folder)),
    "preview, and what is looked at before torch": read_model_fields,
    "run": load_model_config,
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("olmo3", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"is_causal": False}, "is_causal"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo2", {"sliding_window": 64}, "sliding_window"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        (
            "qwen2",
            {"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}},
            "longrope",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": -2.0, "rope_theta": 1e4}},
            "factor",
        ),
        ("llama", {"rope_parameters": {"rope_theta": -5}}, "rope_theta"),
        ("llama", {"head_dim": 7}, "head_dim"),
        ("qwen3", {"head_dim": 15}, "head_dim"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("qwen3_moe", {"moe_intermediate_size": 20}, "moe_intermediate_size"),
        ("llama", {"num_experts": 4}, "num_experts"),
        ("olmo2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_every_command(
    tmp_path: Path, command: str, family: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        COMMANDS[command](folder_of(tmp_path, family, **changes))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_every_family_is_taken_by_every_command(
    tmp_path: Path, command: str, family: str
) -> None:
    assert COMMANDS[command](folder_of(tmp_path, family))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": None}),
        ("llama", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}),
        ("llama", {"attention_dropout": 0.0, "pretraining_tp": 1, "mlp_bias": False}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.001, "output_router_logits": False}),
    ],
)
def test_field_that_changes_nothing_raises_no_alarm(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    for command in COMMANDS.values():
        assert command(folder_of(tmp_path, family, **changes))


def test_public_models_are_all_taken() -> None:
    assert all(model_shape(name) for name in public_models())


# --- RoPE
# -----------------------------------------------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
THETA = {"rope_theta": 20000.0}
RIGHT = {FULL: YARN | THETA, SLIDING: {"rope_type": "default"} | THETA}
OLD_YARN = {"type" if name == "rope_type" else name: value for name, value in YARN.items()}
SPELLINGS: dict[str, dict[str, Any]] = {
    "by layer type": {"rope_parameters": RIGHT},
    "one object, as transformers 5.0 to 5.8 wrote": {"rope_parameters": YARN | THETA},
    "one object and a theta beside": {"rope_parameters": YARN, **THETA},
    "as transformers 4 wrote": {"rope_scaling": YARN, **THETA},
    "older": {"rope_scaling": OLD_YARN, **THETA},
    "both": {"rope_parameters": RIGHT, "rope_scaling": YARN, **THETA},
    "full attention alone": {"rope_parameters": {FULL: YARN | THETA}},
    "thetas at the top": {
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default"}},
        **THETA,
    },
    "null beside": {"rope_parameters": YARN | THETA | {"mscale": None}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_of_layers_with_windows_is_read_in_every_spelling(
    tmp_path: Path, spelling: str
) -> None:
    folder = folder_of(tmp_path, "olmo3", **({"rope_parameters": None} | SPELLINGS[spelling]))
    assert load_hf_config(str(folder)).rope_parameters == RIGHT
    assert model_shape(str(folder))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("olmo3", {"rope_parameters": {**RIGHT, "rope_theta": 5.0}}, "beside"),
        ("olmo3", {"rope_parameters": RIGHT, "rope_theta": 5.0}, "rope_theta"),
        ("olmo3", {"rope_parameters": RIGHT, "rope_scaling": YARN | {"factor": 4.0}}, "factor"),
        ("llama", {"rope_parameters": YARN | THETA, "rope_theta": 5.0}, "rope_theta"),
        ("llama", {"rope_parameters": THETA, "rope_scaling": {"rope_type": "yarn"} | {"rope_theta": 7.0}}, "rope"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling"),
        ("olmo3", {"rope_parameters": {FULL: 3, SLIDING: THETA}}, FULL),
    ],
)  # fmt: skip
def test_rope_that_contradicts_itself_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    folder = folder_of(tmp_path, family, **changes)
    for command in COMMANDS.values():
        with pytest.raises(InputError, match=named):
            command(folder)


# --- what an export says
# ---------------------------------------------------------------------------------


def exported(folder: Path, out: Path) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    _write_config(out, folder, TensorNames(load_hf_config(str(folder))), torch.bfloat16, {})
    fields: dict[str, Any] = json.loads((out / "config.json").read_text())
    return fields


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_export_has_rope_as_every_reader_spells_it(tmp_path: Path, spelling: str) -> None:
    folder = folder_of(
        tmp_path / "in", "olmo3", **({"rope_parameters": None} | SPELLINGS[spelling])
    )
    fields = exported(folder, tmp_path / "out")
    assert fields["rope_parameters"] == RIGHT  # transformers 5
    assert (fields["rope_theta"], fields["rope_scaling"]) == (20000.0, YARN)  # transformers 4
    assert load_hf_config(str(tmp_path / "out")).rope_parameters == RIGHT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [None, ["Qwen3Model"], ["LlamaForSequenceClassification"]])
def test_export_names_the_class_that_was_trained(tmp_path: Path, family: str, given: Any) -> None:
    (name,) = exported(folder_of(tmp_path / "in", family, architectures=given), tmp_path / "out")[
        "architectures"
    ]
    assert name.endswith("ForCausalLM")


@pytest.mark.parametrize("given", [{}, {"dtype": "float32"}, {"torch_dtype": "float32"}, None])
def test_export_says_its_dtype_under_every_name(
    tmp_path: Path, given: dict[str, str] | None
) -> None:
    given = {"dtype": "float32", "torch_dtype": "float16"} if given is None else given
    folder = folder_of(tmp_path / "in", "llama", **({"dtype": None, "torch_dtype": None} | given))
    fields = exported(folder, tmp_path / "out")
    told = {name: fields[name] for name in ("dtype", "torch_dtype") if name in fields}
    assert set(told.values()) == {"bfloat16"} and told.keys() >= given.keys()


NAMED = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "{{ tools }}"}]


@pytest.mark.parametrize(
    ("given", "is_chosen", "expected"),
    [
        ("old", True, "new"),
        ("old", False, "new"),
        ("new", False, "new"),
        (NAMED, True, "new"),
        (NAMED, False, NAMED),
        (None, True, None),
    ],
)
def test_export_has_one_chat_template_wherever_readers_look(
    tmp_path: Path, given: Any, is_chosen: bool, expected: Any
) -> None:
    files = [tmp_path / name for name in ("tokenizer_config.json", "chat_template.json")]
    for file in files:
        file.write_text(
            json.dumps({"eos_token": "x"} | ({"chat_template": given} if given else {}))
        )
    (tmp_path / "chat_template.jinja").write_text("new")
    align_chat_templates(tmp_path, is_chosen=is_chosen)
    for file in files:
        fields = json.loads(file.read_text())
        assert fields["eos_token"] == "x" and fields.get("chat_template") == expected


# --- files of weights
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight_map", "is_taken"),
    [
        ({"a": "model-00001-of-00002.safetensors"}, False),
        ({"a": SINGLE_NAME, "b": "model-00002-of-00002.safetensors"}, False),
        ({"a": SINGLE_NAME, "b": SINGLE_NAME}, True),
        ([], False),
    ],
)
def test_single_file_beside_an_index_of_others_is_refused(
    tmp_path: Path, weight_map: Any, is_taken: bool
) -> None:
    (tmp_path / SINGLE_NAME).touch()
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    if is_taken:
        assert find_weights_file(tmp_path).name == INDEX_NAME
    else:
        with pytest.raises(InputError, match=SINGLE_NAME):
            find_weights_file(tmp_path)


def test_convolutions_in_three_equal_parts_are_joined(tmp_path: Path) -> None:
    config = hf_config("olmo_hybrid")
    names = TensorNames(config)
    shapes = find_parameter_shapes(build_model(config, init_device="meta"))
    wanted = {hf_name: shapes[name] for name, hf_name in names}
    right = {name: torch.randn(shape) for name, shape in wanted.items()}
    stored = dict(right)
    for first in (name for name in right if name.endswith("q_conv1d.weight")):
        parts = [first.replace("q_conv1d", f"{one}_conv1d") for one in "qkv"]
        assert len({len(right[name]) for name in parts}) > 1
        cut = torch.cat([right[name] for name in parts]).chunk(3)
        stored |= zip(parts, (each.contiguous() for each in cut), strict=True)
    save_file(stored, tmp_path / SINGLE_NAME)
    files = CheckpointFiles.open(tmp_path)
    recut_convolutions(files, wanted)
    assert all(torch.equal(files.read(name), right[name]) for name in wanted)


@pytest.mark.parametrize("is_zero", [True, False])
@pytest.mark.parametrize(
    ("place", "is_tied", "token"), [("embed", False, 7), ("head", False, 7), ("embed", True, 4)]
)
def test_tokens_with_untrained_rows_are_named(
    tmp_path: Path, place: str, is_tied: bool, token: int, is_zero: bool
) -> None:
    config = hf_config("llama", tie_word_embeddings=is_tied)
    rows = {"model.embed_tokens.weight": torch.randn(89, 4)}
    if not is_tied:
        rows["lm_head.weight"] = torch.randn(89, 4)
    changed = rows["lm_head.weight" if place == "head" else "model.embed_tokens.weight"]
    changed[token] = 0 if is_zero else changed[3]  # which is a special token's
    save_file(rows, tmp_path / SINGLE_NAME)
    pretrained = Pretrained(
        source=ModelFolder(path=tmp_path, olmo_core=None),
        tokenizer_folder=tmp_path,
        hf_config=config,
        files=CheckpointFiles.open(tmp_path),
        names=TensorNames(config),
        tokenizer=byte_tokenizer(),
    )
    text = byte_tokenizer().convert_ids_to_tokens(token)
    assert repr(text) in (find_untrained_rows(pretrained, {1, token, 80}) or "")
    assert find_untrained_rows(pretrained, {1, 80}) is None
