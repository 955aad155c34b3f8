"""What is supported of config.json computes what transformers computes; the rest is refused by
name.
"""

import dataclasses
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from olmo_core.nn.hf.convert import convert_state_from_hf
from olmo_core.nn.transformer import Transformer

from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES, Family
from open_instruct.models.build import build_model, find_not_finite
from open_instruct.models.family import build_transformer_config, find_unknown_fields
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames, split_as_in_files
from open_instruct.models.shards import find_local_shards
from tests.refusals import refused
from tests.tiers import mark_extended
from tests.unit.small_models import CPU
from tests.unit.small_models import hf_config as small_config

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 97
NUM_TOKENS = 80

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_OF_ALL = YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}
SHORT_ROPE = DEFAULT_ROPE | {"rope_theta": 300.0}
# Small theta, long context: transformers and OLMo-core's own YaRN cut the ramp at different
# dimensions. What a layer of the gated delta rule reads may be so small that its norm enlarges all
# rounding.
SMOOTH = {"initializer_range": 0.1}
YARN_LONG = YARN | {"rope_theta": 100.0, "original_max_position_embeddings": 4096}


# Large weights, so that attention is far from uniform and positions matter.
hf_config = partial(
    small_config, vocab_size=VOCAB_SIZE, max_position_embeddings=4096, initializer_range=0.3
)


def hf_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def same_model(config: transformers.PretrainedConfig, reference: torch.nn.Module) -> Transformer:
    model = build_model(config)
    model.init_weights(device=CPU, max_seq_len=NUM_TOKENS)
    theirs = split_as_in_files(reference.state_dict())
    # What OLMo-core's own conversion does not know.
    family = FAMILIES[config.model_type]
    if family.qkv_bias or family.expert_size or family.delta or config.model_type == "mistral":
        held = find_local_shards(model)
        for name, hf_name in TensorNames(config):
            held[name].local.copy_(theirs[hf_name])
    else:
        model.load_state_dict(convert_state_from_hf(config, theirs, model_type=config.model_type))
    assert find_not_finite(model) == {}
    return model


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("olmo2", {}),
        ("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("olmo2", {"rope_parameters": YARN}),
        ("olmo3", {}),
        ("olmo3", {"sliding_window": 1}),
        ("olmo3", {"sliding_window": 500, "tie_word_embeddings": True}),
        ("olmo3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}),
        ("olmo3", {"layer_types": ["full_attention"] * 4}),
        ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE}}),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": YARN_OF_ALL, "sliding_attention": SHORT_ROPE}},
        ),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True, "head_dim": 24}),
        ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_experts_per_tok": 1}),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0, 2], "num_experts_per_tok": 8, "rope_parameters": YARN},
        ),
        ("olmoe", {}),
        ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 1}),
        ("llama", {"head_dim": 16, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"rope_parameters": LLAMA3}),
        (
            "llama",
            {
                "rope_parameters": LLAMA3
                | {"low_freq_factor": 1.5, "high_freq_factor": 3.3, "factor": 32.0}
            },
        ),
        ("llama", {"rope_parameters": YARN_LONG}),
        ("olmo_hybrid", SMOOTH),
        ("olmo_hybrid", SMOOTH | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
        ("olmo_hybrid", SMOOTH | {"rope_parameters": YARN, "linear_allow_neg_eigval": False}),
        (
            "olmo_hybrid",
            SMOOTH
            | {
                "layer_types": ["full_attention", "linear_attention"] * 2,
                "linear_conv_kernel_dim": 2,
            },
        ),
        ("qwen3_5_text", SMOOTH),
        ("qwen3_5_text", SMOOTH | {"tie_word_embeddings": True, "linear_num_value_heads": 2}),
        ("qwen3_5_text", SMOOTH | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
        ("qwen3_5_text", SMOOTH | {"rope_parameters": DEFAULT_ROPE | {"mrope_section": [1, 1, 1]}}),
    ],
)
def test_logits_are_those_of_transformers(family: str, fields: dict[str, Any]) -> None:
    config = hf_config(family, **fields)
    reference = hf_model(config)
    model = same_model(config, reference)
    input_ids_BT = torch.randint(
        3, VOCAB_SIZE, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected = reference(input_ids_BT).logits
        torch.testing.assert_close(model(input_ids_BT), expected, atol=1e-5, rtol=1e-5)


# Where transformers reads a model's configuration, whatever its class has.
READERS = (
    "transformers.configuration_utils",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.integrations.sdpa_attention",
)
READING = re.compile(r'(?:getattr\((?:self\.)?config, |kwargs\.(?:pop|get)\()"([a-z]\w*)"')
# Fields by which code is found: they are left out.
OF_CODE = {"attn_implementation", "experts_implementation"}
# What a field that is absent, or null, may be set to.
SET = (
    False,
    True,
    2,
    "gelu",
    ["sliding_attention", "full_attention"],
    {"0": {"hidden_act": "gelu"}},
)


def names_of_fields(family: str) -> list[str]:
    """All that a config.json of the family may have, as transformers' own sources say."""
    config_class = transformers.CONFIG_MAPPING[family]
    names = {field.name for field in dataclasses.fields(config_class)} | {
        "sliding_window",
        "rope_theta",
    }
    own = config_class.__module__
    for module in (*READERS, own, own.replace("configuration_", "modeling_")):
        names |= set(
            READING.findall(Path(str(importlib.import_module(module).__file__)).read_text())
        )
    return sorted(names - OF_CODE)


def other_values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return tuple(other for other in (1, 2, 8) if other != value)
    if isinstance(value, float):
        return (0.25, 1.0)
    if isinstance(value, str):
        return ("gelu",)
    if isinstance(value, list):
        return (
            value[::-1],
            [1],
            ["sliding_attention"] * 2,
            ["full_attention"] * 2,
            ["chunked_attention"] * 2,
        )
    if isinstance(value, dict):
        return (
            DEFAULT_ROPE | {"rope_theta": 100.0},
            LINEAR,
            YARN,
            DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        )
    return SET


def changed_configs(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config.json of a tiny model with one field changed, and which."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    config = hf_config(
        family, **sizes, vocab_size=31, **({"sliding_window": None} if family == "mistral" else {})
    )
    fields = json.loads(config.to_json_string(use_diff=False))
    if family == "olmo3":
        fields |= {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    if family in FAMILIES and FAMILIES[family].delta is not None:
        fields |= {"layer_types": ["linear_attention", "full_attention"]}
    yield "", fields
    for name in names_of_fields(family):
        for value in other_values(fields.get(name)):
            yield name, fields | {name: value}


def with_rope_by_layer(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config.json that transformers reads as it is meant: of one flat object it loses
    OLMo 3's RoPE.
    """
    fields = json.loads(json.dumps(fields))
    rope = fields.get("rope_parameters")
    if family == "olmo3" and isinstance(rope, dict) and "full_attention" not in rope:
        plain = {"rope_type": "default"} | {
            name: rope[name] for name in rope if name == "rope_theta"
        }
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
    return fields


# Mistral as a record that forgets its windows.
@pytest.mark.parametrize("family", mark_extended([*FAMILIES, "mistral"], but=["olmo2"]))
def test_every_field_of_a_config_is_read_or_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it changes what transformers computes."""
    monkeypatch.setitem(
        FAMILIES, "mistral", Family(name="Mistral", config_class="MistralConfig", qk_norm="none")
    )
    input_ids_BT = torch.randint(3, 31, (2, 24), generator=torch.Generator().manual_seed(1))
    unnamed: list[str] = []
    plain_BTV, logits, became = (
        torch.empty(0),
        dict[tuple[str, float], torch.Tensor](),
        Counter[str](),
    )
    for name, fields in changed_configs(family):
        case, text = f"{name} = {fields.get(name)}", json.dumps(fields)
        (tmp_path / "config.json").write_text(text)
        try:
            config = load_hf_config(str(tmp_path))
            ours = build_transformer_config(config)
        except InputError as error:
            became["refused"] += 1
            # RoPE's are named by the name they have now.
            if not re.search(rf"{name}|rope_parameters|transformers cannot read it", str(error)):
                unnamed.append(f"{case}: {error}")
            continue
        try:
            reference = hf_model(
                transformers.CONFIG_MAPPING[family].from_dict(with_rope_by_layer(family, fields))
            )
            with torch.no_grad():
                expected_BTV = reference(input_ids_BT).logits
        except Exception:  # transformers has no model of it either
            continue
        # What it is built from: of the same there is the same.
        built_from = (
            repr(ours.as_config_dict()),
            float(sum(each.double().sum() for each in reference.parameters())),
        )
        if built_from not in logits:
            with torch.no_grad():
                logits[built_from] = same_model(config, reference)(input_ids_BT)
        ours_BTV = logits[built_from]
        torch.testing.assert_close(
            ours_BTV,
            expected_BTV,
            atol=1e-4,
            rtol=1e-4,
            msg=lambda told, case=case: f"{case}: {told}",
        )
        if not name:
            plain_BTV = expected_BTV
        became["no matter" if torch.equal(expected_BTV, plain_BTV) else "read"] += 1
    assert not unnamed
    # Of each kind there are some.
    assert became["refused"] > 30 and became["read"] > 8 and became["no matter"] > 30, became


def test_fields_that_nothing_knows_are_named(tmp_path: Path) -> None:
    fields = hf_config("qwen2").to_dict() | {
        "torch_dtype": "bfloat16",
        "do_sample": True,
        "rope_theta": 1e4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"use_mrope": False, "tokenizer_class": "T", "eos": None})
    )
    assert find_unknown_fields(load_hf_config(str(tmp_path))) == []
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"residual_scale": 0.5, "qk_clip": True})
    )
    assert find_unknown_fields(load_hf_config(str(tmp_path))) == ["residual_scale", "qk_clip"]
    # Ids of special tokens, as transformers and converters write them.
    names = ("unk", "sep", "cls", "mask", "image")
    ids = {f"{name}_token_id": 3 for name in names}
    (tmp_path / "config.json").write_text(json.dumps(fields | ids))
    assert find_unknown_fields(load_hf_config(str(tmp_path))) == []
    # As the released text parts have them.
    fields = hf_config("qwen3_5_text").to_dict() | {
        "attn_output_gate": True,
        "full_attention_interval": 4,
    }
    fields |= {
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "layer_scale": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert find_unknown_fields(load_hf_config(str(tmp_path))) == ["layer_scale"]


@pytest.mark.parametrize("scaled", [LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def test_rope_scaling_changes_the_logits(scaled: dict[str, Any]) -> None:
    """The equality above would mean little if the logits did not depend on the scaling."""
    plain_config = hf_config(
        "llama", rope_parameters=DEFAULT_ROPE | {"rope_theta": scaled["rope_theta"]}
    )
    reference = hf_model(plain_config)
    input_ids_BT = torch.arange(3, 3 + NUM_TOKENS).unsqueeze(0)
    with torch.no_grad():
        plain = same_model(plain_config, reference)(input_ids_BT)
        changed = same_model(hf_config("llama", rope_parameters=scaled), reference)(input_ids_BT)
    assert (plain - changed).abs().max() > 1e-2


def test_shape_of_a_large_model_follows_from_its_config() -> None:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert (
        build_transformer_config(transformers.Qwen3Config(**sizes, **heads)).num_params
        == 8_190_735_360
    )  # Qwen3-8B's published weights


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            hf_config("llama", hidden_act="relu"),
            ("unsupported_model", None, "hidden_act", "'relu'", "'silu'"),
        ),
        (
            hf_config("olmo3", attention_dropout=0.1),
            ("unsupported_model", None, "attention_dropout", "0.1"),
        ),
        (
            hf_config("llama", quantization_config={"quant_method": "fp8"}),
            ("unsupported_model", None, "quantization_config"),
        ),
        (
            hf_config("qwen2", use_sliding_window=True, max_window_layers=2),
            ("unsupported_model", None, "use_sliding_window"),
        ),
        (
            hf_config("llama", rope_parameters=DYNAMIC),
            ("unsupported_model", None, "'dynamic'", "'default'", "'linear'"),
        ),
        (
            hf_config("llama", rope_parameters=YARN | {"truncate": False}),
            ("unsupported_model", None, "truncate = False"),
        ),
        (
            hf_config("llama", rope_parameters=YARN | {"mscale": 0.7}),
            ("unsupported_model", None, "mscale = 0.7"),
        ),
        (
            hf_config("llama", rope_parameters=LINEAR | {"factor": -1.0}),
            ("bad_model", None, "factor = -1.0"),
        ),
        (
            hf_config("llama", rope_parameters=LLAMA3 | {"high_freq_factor": 1.0}),
            ("bad_model", None, "high_freq_factor", "1.0"),
        ),
        (hf_config("olmo3", sliding_window=None), ("bad_model", None, "sliding_window")),
        (
            hf_config("llama", sliding_window=16),
            ("unsupported_model", None, "sliding_window", "16"),
        ),
        (hf_config("llama", head_dim=3), ("bad_model", None, "3")),
        (
            hf_config("llama", num_key_value_heads=3),
            ("bad_model", None, "num_key_value_heads", "3"),
        ),
        (transformers.GPT2Config(), ("unsupported_model", None, "'gpt2'", "3")),
        (transformers.MixtralConfig(), ("unsupported_model", None, "'mixtral'")),
        (
            hf_config("qwen3_moe", num_experts_per_tok=9),
            ("bad_model", None, "num_experts_per_tok", "9", "1"),
        ),
        (
            hf_config("qwen3_moe", moe_intermediate_size=20),
            ("unsupported_model", None, "moe_intermediate_size", "20", "8"),
        ),
        (hf_config("olmoe", clip_qkv=8.0), ("unsupported_model", None, "clip_qkv", "8.0")),
        (hf_config("qwen3", num_experts=8), ("unsupported_model", None, "num_experts", "8")),
        (
            hf_config("qwen3_5_text", attn_output_gate=False),
            ("unsupported_model", None, "attn_output_gate"),
        ),
        (
            hf_config("olmo_hybrid", attn_output_gate=True),
            ("unsupported_model", None, "attn_output_gate"),
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_unsupported_field_is_refused_by_name(
    config: transformers.PretrainedConfig, named: tuple[Any, ...]
) -> None:
    with refused(*named):
        build_transformer_config(config)


def test_config_survives_the_way_through_the_file_in_either_spelling(tmp_path: Path) -> None:
    """Checkpoints saved before transformers 5 have `rope_theta` and `rope_scaling` at the top."""
    nested = hf_config(
        "olmo3", rope_parameters={"full_attention": YARN, "sliding_attention": DEFAULT_ROPE}
    )
    nested.save_pretrained(tmp_path)
    loaded = load_hf_config(str(tmp_path))
    assert (
        build_transformer_config(loaded).as_config_dict()
        == build_transformer_config(nested).as_config_dict()
    )

    fields = hf_config("llama", rope_parameters=LLAMA3).to_dict()
    scaling = fields.pop("rope_parameters")
    fields["rope_theta"] = scaling.pop("rope_theta")
    fields["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(fields))
    old = build_transformer_config(load_hf_config(str(tmp_path)))
    new = build_transformer_config(hf_config("llama", rope_parameters=LLAMA3))
    assert old.as_config_dict() == new.as_config_dict()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{\n 5}", ("unreadable_file", None, "config.json", "2")),
        (b"[1]", ("unreadable_file", None, "config.json")),
        (b"\xff{}", ("unreadable_file", None, "config.json", "8")),
        (b"{}", ("bad_model", None, "config.json", "'model_type'", "2")),
        (
            b'{"model_type": "mixtral"}',
            ("unsupported_model", None, "config.json", "model_type", "'mixtral'"),
        ),
        (b'{"model_type": "llama", "rms_norm_eps": "small"}', ("bad_model", None, "config.json")),
        (None, ("missing_file", None, "config.json")),
    ],
)
def test_damaged_config_file_is_named(
    tmp_path: Path, content: bytes | None, problem: tuple[Any, ...]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with refused(*problem):
        load_hf_config(str(tmp_path))


def test_paths_that_are_no_folder_are_named(tmp_path: Path) -> None:
    with refused("bad_model", None, "such folder"):
        load_hf_config(str(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").touch()
    with refused("bad_model", None):
        load_hf_config(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("init_device", ["meta", "cpu"])
def test_fresh_model_is_poisoned_until_it_is_loaded(init_device: str) -> None:
    model = build_model(hf_config("llama", tie_word_embeddings=True), init_device=init_device)
    assert {parameter.device.type for parameter in model.parameters()} == {init_device}
    model.init_weights(device=CPU)
    names = [name for name, _ in model.named_parameters()]
    assert find_not_finite(model) == dict.fromkeys(names, "NaN")
    assert model.lm_head.w_out.weight is model.embeddings.weight

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    assert find_not_finite(model) == {}
    with torch.no_grad():
        model.blocks["2"].attention.w_k.weight[-1, -1] = float("nan")
        model.blocks["1"].attention.w_k.weight[0, 0] = float("-inf")
        model.blocks["1"].attention.w_v.weight[0, 0] = float("inf")
    assert find_not_finite(model) == {
        "blocks.1.attention.w_k.weight": "inf",
        "blocks.1.attention.w_v.weight": "inf",
        "blocks.2.attention.w_k.weight": "NaN",
    }


def test_names_of_a_checkpointed_model_are_plain() -> None:
    model = build_model(hf_config("llama"))
    names = [name for name, _ in model.named_parameters()]
    model.apply_activation_checkpointing("full")
    model.init_weights(device=CPU)
    assert find_not_finite(model) == dict.fromkeys(names, "NaN")
