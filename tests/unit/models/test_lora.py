"""What adapters ask of flags and folders, and how they begin."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError
from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames, clean_name
from open_instruct.models.lora.adapters import (
    add_adapters,
    disable_adapters,
    fill_adapter,
    find_adapted_layers,
    find_merged_weights,
    gather_adapter,
)
from open_instruct.models.lora.files import (
    BASE_FINGERPRINT,
    WEIGHTS_NAME,
    check_base,
    find_peft_name,
    open_adapter,
)
from open_instruct.models.lora.peft_config import CONFIG_NAME
from open_instruct.models.shards import find_local_shards, flat_shard
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from tests.refusals import refused
from tests.unit.small_models import CPU, hf_config, new_model, with_random_weights

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 43).unsqueeze(0)


def adapted(lora: LoRASection, *, family: str = "llama", seed: int = 0) -> Any:
    model = build_model(hf_config(family))
    add_adapters(model, lora, dtype=torch.float32)
    model.init_weights(device=CPU, max_seq_len=64)
    with_random_weights(model)
    fill_adapter(model, lora, seed=seed, start=None)
    return model


def test_switched_off_it_is_the_model_that_it_was() -> None:
    model, untouched = adapted(LoRASection(lora_r=3)), new_model("llama")
    untouched.load_state_dict(model.state_dict(), strict=False)
    plain = model(IDS)
    assert torch.equal(plain, untouched(IDS)), "a new adapter adds nothing"
    with torch.no_grad():
        for layer in find_adapted_layers(model).values():
            layer.lora_B.normal_(std=0.1)
    assert (model(IDS) - plain).abs().max() > 1e-2
    with disable_adapters(model):
        assert torch.equal(model(IDS), plain)
    merged, without = find_merged_weights(model), find_local_shards(model)
    assert list(merged) == list(without)
    layer = model.blocks["1"].feed_forward.w2
    torch.testing.assert_close(
        merged["blocks.1.feed_forward.w2.weight"].local,
        layer.weight + layer.scale * layer.lora_B @ layer.lora_A,
    )
    name = "blocks.1.attention_norm.weight"
    assert merged[name].local.data_ptr() == without[name].local.data_ptr(), (
        "what has no adapter is not copied"
    )


def test_ranks_that_hold_ranges_of_a_matrix_add_their_part() -> None:
    """Ranges begin and end within rows, or hold nothing."""
    model, name = adapted(LoRASection(lora_r=3)), "blocks.1.feed_forward.w2.weight"
    layer = find_adapted_layers(model)[name.removesuffix(".weight")]
    with torch.no_grad():
        layer.lora_B.normal_(std=0.1)
    whole, size = find_merged_weights(model)[name].local, layer.weight.numel()
    ranges = [
        (0, 5),
        (5, 5),
        (5, layer.in_features * 2),
        (layer.in_features * 2, size),
        (size, size),
    ]
    for rank, (start, stop) in enumerate(ranges):
        local, shape = layer.weight.detach().flatten()[start:stop], tuple(layer.weight.shape)
        layer.weight.local_shard = flat_shard(local, shape, ranges, rank=rank)  # type: ignore[attr-defined]
        part = find_merged_weights(model)[name]
        assert part.box == (slice(start, stop),)
        torch.testing.assert_close(part.local, whole.flatten()[start:stop])


def test_only_adapters_are_trained_and_float32() -> None:
    model = build_model(hf_config("qwen2"))
    add_adapters(model, LoRASection(lora_target_modules=["o_proj", "q_proj"]), dtype=torch.bfloat16)
    trained = {
        clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert trained == {
        f"blocks.{layer}.attention.{matrix}.lora_{half}"
        for layer in range(4)
        for matrix in ("w_q", "w_out")
        for half in "AB"
    }
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), (
            name
        )


def test_matrix_of_a_score_is_trained_whole() -> None:
    model = build_model(hf_config("llama"), head="score")
    add_adapters(model, LoRASection(), dtype=torch.bfloat16)
    whole = [
        name for name, each in model.named_parameters() if each.requires_grad and "lora" not in name
    ]
    assert whole == ["lm_head.w_out.weight"]
    assert model.lm_head.w_out.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("init", "spread"), [("kaiming", 1 / (3 * 32) ** 0.5), ("gaussian", 1 / 16)]
)
def test_initial_adapters_are_drawn_by_name(init: Any, spread: float) -> None:
    lora = LoRASection(lora_init=init)
    first, again, other = (dict(gather_adapter(adapted(lora, seed=seed))) for seed in (0, 0, 1))
    names = [name for name in first if name.endswith("w_q.lora_A")]
    assert torch.cat([first[name].flatten() for name in names]).std() == pytest.approx(
        spread, rel=0.1
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[names[0]], other[names[0]])
    assert not torch.equal(first[names[0]], first[names[1]])


def test_scale() -> None:
    assert LoRASection(lora_r=16, lora_alpha=32).scale == 2
    assert LoRASection(lora_r=16, lora_alpha=32, use_rslora=True).scale == 8


FLAGS = ["--model_name_or_path", "m", "--mixer_list", "rows.jsonl", "1.0", "--output_dir", "out"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--lora_r 8", ("unread_flag", "lora_r", "8", "--use_lora")),
        ("--use_lora --lora_r 0", ("out_of_range", "lora_r", "0")),
        (
            "--use_lora --lora_target_modules lm_head",
            ("bad_value", "lora_target_modules", "q_proj"),
        ),
        ("--use_lora --optimizer muon", ("conflict", "optimizer", "muon", "--use_lora")),
        (
            "--use_lora --backend deepspeed --deepspeed_stage 2 --tensor_parallel_degree 2",
            ("conflict", "backend", "deepspeed", "--tensor_parallel_degree 2", "--use_lora"),
        ),
        (
            "--use_lora --lora_dropout 0.1 --tensor_parallel_degree 2",
            ("conflict", "lora_dropout", "0.1"),
        ),
        ("--use_lora --ref_policy_update_freq 5", ("conflict", "ref_policy_update_freq")),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: str, problem: tuple[Any, ...]) -> None:
    with refused(*problem):
        validate_dpo(parse_run(DPOConfig, [*FLAGS, *flags.split()]))


def stored(folder: Path, lora: LoRASection, **changes: Any) -> Path:
    folder.mkdir()
    names = TensorNames(hf_config("llama"))
    tensors = {find_peft_name(name, names): whole for name, whole in gather_adapter(adapted(lora))}
    save_file(tensors, folder / WEIGHTS_NAME)
    targets = list(lora.targets)
    fields = {
        "peft_type": "LORA",
        "r": lora.lora_r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": targets,
    }
    (folder / CONFIG_NAME).write_text(json.dumps(fields | changes))
    return folder


def opened(folder: Path, lora: LoRASection) -> dict[str, torch.Tensor]:
    config = hf_config("llama")
    return open_adapter(folder, build_model(config), TensorNames(config), lora)


UP = LoRASection(lora_target_modules=["up_proj"])
UP_AND_Q = LoRASection(lora_target_modules=["up_proj", "q_proj"])
UP_OF_5 = LoRASection(lora_r=5, lora_target_modules=["up_proj"])


def test_adapter_is_read_as_it_was_written(tmp_path: Path) -> None:
    written, read = (
        dict(gather_adapter(adapted(UP_AND_Q))),
        opened(stored(tmp_path / "adapter", UP_AND_Q), UP_AND_Q),
    )
    assert written.keys() == read.keys()
    assert all(torch.equal(read[name], written[name]) for name in read)


BAD_R, BAD_ALPHA, BAD_TARGETS = (
    ("bad_model", None, name) for name in ("r", "lora_alpha", "target_modules")
)
NOT_PLAIN = (
    "pissa",
    "pissa_niter_16",
    "PiSSA",
    "olora",
    "loftq",
    "corda",
    "lora_ga",
    "of tomorrow",
    1,
    0,
    [True],
)
PLAIN = (
    *(
        {"init_lora_weights": each}
        for each in (True, False, None, "gaussian", "Gaussian", "eva", "orthogonal")
    ),
    *(
        {"loftq_config": {}, "eva_config": None},
        {"modules_to_save": None},
        {"use_rslora": False},
        {"alpha_pattern": {}},
    ),
    {
        "lora_bias": False,
        "use_dora": False,
        "exclude_modules": None,
        "layers_pattern": None,
        "corda_config": None,
    },
    {
        "peft_version": "0.21.2",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "auto_mapping": None,
        "revision": "x",
    },
)


@pytest.mark.parametrize("changes", PLAIN)
def test_adapter_that_peft_computes_alike_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    assert opened(stored(tmp_path / "adapter", UP, **changes), UP)


@pytest.mark.parametrize(
    ("changes", "lora", "problem"),
    [
        ({"use_dora": True}, UP, ("bad_model", None, "use_dora")),
        ({"target_modules": ["lm_head"]}, UP, ("bad_model", None, "target_modules")),
        ({"r": 4}, UP, ("conflict", "adapter_name_or_path", "--lora_r 4")),
        *(({"r": rank}, UP, BAD_R) for rank in ("many", math.inf, 0, -3, 4.0, True, None, 10**400)),
        *(
            ({"lora_alpha": alpha}, UP, BAD_ALPHA)
            for alpha in ("8", 0, -8, math.inf, math.nan, 10**400, None)
        ),
        *(
            ({"target_modules": each}, UP, BAD_TARGETS)
            for each in ([["q_proj"]], [3], {"q_proj": 1}, None)
        ),
        *(
            ({"use_rslora": each}, UP, ("bad_model", None, "use_rslora"))
            for each in ("false", 1, "")
        ),
        *(
            ({"init_lora_weights": each}, UP, ("bad_model", None, "init_lora_weights"))
            for each in NOT_PLAIN
        ),
        (
            {"modules_to_save": ["embed_tokens", "lm_head"]},
            UP,
            ("bad_model", None, "modules_to_save"),
        ),
        ({"rank_pattern": {"q_proj": 2}}, UP, ("bad_model", None, "rank_pattern")),
        ({"kasa_config": {"beta": 1}}, UP, ("bad_model", None, "kasa_config")),
        ({"target_parameters": ["experts.w1"]}, UP, ("bad_model", None, "target_parameters")),
        ({"peft_type": "IA3"}, UP, ("bad_model", None, "peft_type")),
        ({"bias": "all"}, UP, ("bad_model", None, "bias")),
        (
            {"target_modules": list(UP_AND_Q.targets)},
            UP_AND_Q,
            ("bad_model", "lora_target_modules", "base_model"),
        ),
        ({"r": 5}, UP_OF_5, ("bad_model", "lora_target_modules", "5", "32")),
    ],
)
def test_adapter_that_does_not_fit_is_refused(
    changes: dict[str, Any], lora: LoRASection, problem: tuple[Any, ...], tmp_path: Path
) -> None:
    folder = stored(tmp_path / "adapter", UP, **changes)
    with refused(*problem):
        opened(folder, lora)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.", ""),
        (".lora_A.weight", ".lora_A.default.weight"),
    ],
)
def test_adapter_of_other_names_is_refused_and_not_passed_over(
    ours: str, theirs: str, tmp_path: Path
) -> None:
    """As of the same model within another class; readers that match by endings load nothing."""
    path = stored(tmp_path / "adapter", UP) / WEIGHTS_NAME
    renamed = {name.replace(ours, theirs, 1): each for name, each in load_file(path).items()}
    save_file(renamed, path)
    with refused("bad_model", None, next(iter(renamed))):
        opened(path.parent, UP)


def test_incomplete_adapter_is_refused(tmp_path: Path) -> None:
    with refused("missing_file", "adapter_name_or_path", "adapter_config.json"):
        opened(tmp_path, UP)
    weights = stored(tmp_path / "cut", UP) / WEIGHTS_NAME
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InputError, match=WEIGHTS_NAME):
        opened(weights.parent, UP)


def test_weights_that_an_adapter_was_made_beside(tmp_path: Path) -> None:
    """Are known by what its file says of them, or else by the folder that it names."""
    for known, named, fingerprint, told in (
        ({}, tmp_path, "1", None),
        ({}, "allenai/OLMo-2-0425-1B", "1", "cannot be told"),
        ({BASE_FINGERPRINT: "1"}, "allenai/OLMo-2-0425-1B", "1", None),
        ({BASE_FINGERPRINT: "1"}, tmp_path, "2", "has other weights; give that model"),
    ):
        (tmp_path / CONFIG_NAME).write_text(json.dumps({"base_model_name_or_path": str(named)}))
        save_file(
            {"a": torch.zeros(1)}, tmp_path / WEIGHTS_NAME, metadata={"format": "pt", **known}
        )
        if fingerprint == "2":
            with pytest.raises(InputError, match=told):
                check_base(tmp_path, tmp_path, fingerprint)
        else:
            warning = check_base(tmp_path, tmp_path, fingerprint)
            assert (warning is None) if told is None else (warning is not None and told in warning)
