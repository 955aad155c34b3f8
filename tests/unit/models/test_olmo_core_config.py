"""The config.json of OLMo-core: what is read of it, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.rope import (
    ABFRoPEScalingConfig,
    PIRoPEScalingConfig,
    RoPEScalingConfig,
    StepwiseRoPEScalingConfig,
    YaRNRoPEScalingConfig,
)

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.sections import ModelSection
from open_instruct.core.errors import InputError
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.family import build_transformer_config
from open_instruct.models.model_folder import (
    check_model_folder,
    find_tokenizer_name,
    load_model_config,
    open_model_folder,
    read_model_fields,
)
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.run.first_look import check_vocabulary
from tests.olmo_core_checkpoints import (
    NUM_TOKENS,
    VOCAB_SIZE,
    make_config,
    scale_full_layers,
    write_config,
)
from tests.refusals import refused

Change = Callable[[dict[str, Any]], object]


def read(folder: Path, change: Change = lambda fields: None) -> dict[str, Any]:
    """The fields that are read of an OLMo 3 after a change of its config.json."""
    import json

    fields = write_config(folder, make_config("olmo3"))
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_fields(folder)


def test_fields_are_those_of_the_same_model_in_hugging_face(tmp_path: Path) -> None:
    fields = read(tmp_path)
    assert fields["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
    assert (fields["sliding_window"], fields["max_position_embeddings"]) == (7, 128)
    assert (fields["vocab_size"], fields["eos_token_id"]) == (VOCAB_SIZE, 1)
    assert (fields["num_attention_heads"], fields["num_key_value_heads"]) == (4, 2)


@pytest.mark.parametrize("kind", ["olmo2", "olmo3", "llama", "qwen3"])
def test_plan_counts_the_parameters_that_olmo_core_counts(tmp_path: Path, kind: str) -> None:
    config = make_config(kind)
    write_config(tmp_path, config)
    for path in (tmp_path, tmp_path / "config.json"):
        assert model_shape(str(path)).num_params == config.num_params


@pytest.mark.parametrize(
    "scaling",
    [
        ABFRoPEScalingConfig(new_theta=2_000_000),
        PIRoPEScalingConfig(factor=4.0),
        StepwiseRoPEScalingConfig(factor=8.0, old_context_len=64),
        YaRNRoPEScalingConfig(factor=4.0, old_context_len=64),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_frequencies_of_rope_are_those_of_olmo_core(
    tmp_path: Path, scaling: RoPEScalingConfig
) -> None:
    import torch

    config = make_config("olmo2").with_rope_scaling(scaling)
    write_config(tmp_path, config)
    ours = build_transformer_config(load_model_config(tmp_path)).block.sequence_mixer.rope
    cpu = torch.device("cpu")
    theirs, factor = scaling.compute_scaled_inv_freq(500_000, 16, cpu)
    if ours.scaling is None:
        assert ours.theta == scaling.new_theta
        return
    frequencies, our_factor = ours.scaling.compute_scaled_inv_freq(500_000, 16, cpu)
    torch.testing.assert_close(frequencies, theirs, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


def block(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["model"]["block"]


def mixer(fields: dict[str, Any]) -> dict[str, Any]:
    return block(fields)["sequence_mixer"]


KDA = "olmo_core.nn.attention.kda.KimiDeltaAttentionConfig"
EXPERTS = {"num_experts": 8, "hidden_size": 64}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: block(fields).update(feed_forward_moe=EXPERTS), ["feed_forward_moe"]),
        (lambda fields: block(fields).update(name="moe_reordered_norm"), ["moe_reordered_norm"]),
        (lambda fields: block(fields).update(name="peri_norm"), ["peri_norm"]),
        (lambda fields: block(fields).update(dropout=0.1), ["dropout", "0.1"]),
        (lambda fields: mixer(fields).update(_CLASS_=KDA), ["KimiDeltaAttentionConfig"]),
        (lambda fields: mixer(fields).update(name="fused_v2"), ["fused_v2"]),
        (lambda fields: mixer(fields).update(gate={"granularity": "headwise"}), ["gate"]),
        (lambda fields: mixer(fields).update(clip_qkv=8.0), ["clip_qkv", "8.0"]),
        (lambda fields: mixer(fields).update(attention_sinks=True), ["attention_sinks"]),
        (lambda fields: mixer(fields).pop("bias"), ["bias"]),
        (lambda fields: mixer(fields).pop("qk_norm"), ["queries and keys"]),
        (lambda fields: mixer(fields)["rope"].update(no_global_rope=True), ["no_global_rope"]),
        (lambda fields: mixer(fields)["rope"].update(name="complex"), ["complex"]),
        (lambda fields: mixer(fields)["qk_norm"].update(eps=1e-3), ["eps", "0.001"]),
        (lambda fields: mixer(fields)["sliding_window"].update(pattern=[3, 5]), ["[3, 5]"]),
        (lambda fields: block(fields)["feed_forward"].update(activation="gelu"), ["gelu"]),
        (lambda fields: fields["model"].update(embed_scale=8.0), ["embed_scale"]),
        (lambda fields: fields["model"].update(name="normalized"), ["normalized"]),
        (lambda fields: fields["model"].update(new_trick=3), ["new_trick", "3"]),
        (
            lambda fields: fields["model"].update(
                block_overrides={"1": block(fields) | {"name": "default"}}
            ),
            ["layer 1"],
        ),
        (lambda fields: fields["model"].update(n_layers="3"), ["n_layers"]),
        (lambda fields: fields["model"].update(block=[]), ["block"]),
        (lambda fields: fields["model"].pop("lm_head"), ["lm_head"]),
        (lambda fields: fields["model"].update(vocab_size=NUM_TOKENS - 1), ["249", "250"]),
        (lambda fields: fields["dataset"]["tokenizer"].update(eos_token_id=-1), ["eos_token_id"]),
    ],
)
def test_what_changes_the_result_is_refused_by_name(
    tmp_path: Path, change: Change, words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, change)
    assert {problem.kind for problem in caught.value.problems} <= {"unsupported_model", "bad_model"}
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def test_class_that_a_section_names_is_never_imported(tmp_path: Path) -> None:
    module = tmp_path / "planted_module.py"
    module.write_text("raise SystemExit('imported')")
    name = "planted_module.Planted"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        fields = read(tmp_path, lambda fields: fields["model"].update(_CLASS_=name))
        assert fields["hidden_size"] == 64
        with refused("unsupported_model", None, "Planted"):
            read(tmp_path, lambda fields: mixer(fields).update(_CLASS_=name))


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["model"].update(compile=True, dp_config={"name": "fsdp"}),
        lambda fields: fields["model"].update(init_method="llama", init_seed=4),
        lambda fields: mixer(fields).update(backend="flash_2", use_flash=True),
        lambda fields: block(fields).update(attention=block(fields).pop("sequence_mixer")),
        lambda fields: fields.update(tokenizer=fields["dataset"].pop("tokenizer")),
        lambda fields: fields.update(launch={"anything": 1}, trainer={"max_duration": 3}),
    ],
)
def test_what_changes_nothing_is_passed_over(tmp_path: Path, change: Change) -> None:
    assert read(tmp_path / "changed", change) == read(tmp_path / "plain")


def test_blocks_by_a_pattern_are_the_blocks_of_the_layers(tmp_path: Path) -> None:
    """OLMo-core 3 writes a model with windows that way, too."""

    def spell(fields: dict[str, Any]) -> None:
        with_window = block(fields)
        window = SlidingWindowAttentionConfig(
            pattern=[7],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
        without = {**with_window, "sequence_mixer": dict(with_window["sequence_mixer"])}
        del without["sequence_mixer"]["sliding_window"]
        with_window["sequence_mixer"]["sliding_window"] = window.as_config_dict()
        fields["model"]["block"] = {"near": with_window, "all": without}
        fields["model"]["block_pattern"] = ["near", "near", "all"]

    assert read(tmp_path / "spelled", spell) == read(tmp_path / "plain")


def test_lengths_are_those_that_rope_is_scaled_to(tmp_path: Path) -> None:
    write_config(tmp_path, scale_full_layers(make_config("olmo3")))
    assert read_model_fields(tmp_path)["max_position_embeddings"] == 256


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tokenizer") / "model", family="olmo2")


def test_tokenizer_is_found_beside_or_by_its_name(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "step10"
    write_config(folder, make_config("olmo2"), identifier="allenai/dolma2-tokenizer")
    section = ModelSection(model_name_or_path=str(folder))
    assert find_tokenizer_name(section) == "allenai/dolma2-tokenizer"
    (tmp_path / "tokenizer").symlink_to(tokenizer_folder)
    assert find_tokenizer_name(section) == str(tmp_path / "tokenizer")
    section.tokenizer_name_or_path = "another/name"
    assert find_tokenizer_name(section) == "another/name"
    write_config(tmp_path / "other" / "step1", make_config("olmo2"))
    with refused("missing_flag", "tokenizer_name_or_path", "config.json"):
        find_tokenizer_name(ModelSection(model_name_or_path=str(tmp_path / "other" / "step1")))


@pytest.mark.parametrize(("difference", "is_known"), [(0, True), (-1, False), (1, False)])
def test_tokenizer_of_another_size_is_refused(
    tmp_path: Path, tokenizer_folder: Path, difference: int, is_known: bool
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    described = len(tokenizer) + difference
    write_config(tmp_path, make_config("olmo2", vocab_size=1024), num_tokens=described)
    if is_known:
        check_vocabulary(open_model_folder(tmp_path), tokenizer, tokenizer_folder)
        return
    with refused("conflict", "tokenizer_name_or_path", str(len(tokenizer)), str(described)):
        check_vocabulary(open_model_folder(tmp_path), tokenizer, tokenizer_folder)


def test_folder_beside_the_right_one_is_named(tmp_path: Path) -> None:
    for step in (9, 10):
        write_config(tmp_path / f"step{step}", make_config("olmo2"))
        (tmp_path / f"step{step}" / "model_and_optim").mkdir()
    right = tmp_path / "step10"
    with refused("bad_model", None, str(right)):
        read_model_fields(tmp_path)
    with refused("missing_file", None, ".metadata"):
        check_model_folder(right)
    (right / "model_and_optim" / ".metadata").touch()
    with refused("bad_model", None, str(right)):
        read_model_fields(right / "model_and_optim")
    (right / "config.json").unlink()
    with refused("missing_file", None, "ConfigSaverCallback"):
        read_model_fields(right)
