"""Matrices in 4 bits against torchao and bitsandbytes, and a model that has them against one that
has their values.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.lora import BLOCK, LoRASection
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES
from open_instruct.models.build import build_model, find_not_finite
from open_instruct.models.lora.adapters import (
    add_adapters,
    fill_adapter,
    find_adapted_layers,
    find_merged_weights,
)
from open_instruct.models.nf4 import (
    LEVELS,
    FrozenLinear,
    RoundingMeter,
    dequantize,
    describe_rounding,
    find_rounding,
    quantize,
)
from open_instruct.models.shards import find_local_shards
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.training.measure.speed import count_step_flops
from tests.unit.small_models import CPU, hf_config, with_random_weights

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 43).unsqueeze(0)
LORA = LoRASection(
    use_lora=True, use_qlora=True, lora_r=3, lora_target_modules=["q_proj", "v_proj", "down_proj"]
)
BYTES_OF_BITSANDBYTES = (
    "7e1c4600f12f22f0073a0f9f092901f45f65f10c140fef030e14ecdbddd84f002cfb301fbe5ff1ff2fec71d170"
    "e4d5fe08514419c0fee204bfe020c00f11f008570fbf050e778df6ff7eba74b270e7c5c735371173628d6b7d17"
    "4826d8b7ee7c9c739271e7d4a75317008026771f9f040f797ff1cc1ef6e9e4067f8410e67d77"
)


def random_matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    matrix = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    matrix[7, 64:128] = 0
    return matrix.to(dtype)


def test_bytes_are_those_of_torchao() -> None:
    nf4_tensor = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    matrix = random_matrix()
    matrix[7] = matrix[8]  # it has no scale for a block of zeros
    codes, scales = quantize(matrix, torch.float32)
    theirs = nf4_tensor.to_nf4(matrix, BLOCK, 256)
    differ = codes.flatten() != theirs.quantized_data.flatten()
    # It rounds the quotient otherwise, and takes the other of two levels that are about as near.
    assert differ.float().mean() < 1e-3
    agree = ~differ.view_as(codes).repeat_interleave(2, 1)
    difference = dequantize(codes, scales)[agree] - theirs.get_original_weight()[agree]
    # Its scales are rounded to 8 bits once more.
    assert difference.abs().max() < 0.01 * matrix.abs().max()


def test_bytes_are_those_of_bitsandbytes() -> None:
    """As `quantize_4bit(matrix, blocksize=64, quant_type="nf4")` of its version 0.50.2 gave
    them.
    """
    matrix = torch.arange(256.0).square().sin().view(2, 128)
    matrix[1] = (2 * matrix[1]) ** 3
    codes, scales = quantize(matrix, torch.float32)
    assert bytes(codes.flatten().tolist()).hex() == BYTES_OF_BITSANDBYTES
    torch.testing.assert_close(scales, matrix.view(2, 2, 64).abs().amax(-1), rtol=0, atol=0)


def test_bytes_of_a_float32_matrix_are_the_same_whatever_is_computed_in() -> None:
    """Of bitsandbytes too, which keeps its scales in float32."""
    matrix = random_matrix()
    codes, scales = quantize(matrix, torch.float32)
    rounded_codes, rounded_scales = quantize(matrix, torch.bfloat16)
    assert torch.equal(rounded_codes, codes)
    assert torch.equal(rounded_scales, scales.bfloat16()) and not torch.equal(
        rounded_scales.float(), scales
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_is_the_nearest_level_times_its_scale(dtype: torch.dtype) -> None:
    matrix = random_matrix(dtype)
    codes, scales = quantize(matrix, dtype)
    assert (
        codes.nbytes * 2 == matrix.numel()
        and scales.numel() * BLOCK == matrix.numel()
        and scales.dtype == dtype
    )
    levels = torch.tensor(LEVELS)
    every_OIL = scales.float().repeat_interleave(BLOCK, 1).unsqueeze(-1) * levels
    distances_OIL = (every_OIL - matrix.float().unsqueeze(-1)).abs()
    nearest = every_OIL.gather(-1, distances_OIL.argmin(-1, keepdim=True)).squeeze(-1)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(
        dequantize(codes, scales).float(), nearest, rtol=tolerance, atol=1e-9
    )
    error = (nearest - matrix.float()).norm() / matrix.float().norm()
    assert 0.08 < error < 0.1
    for rows in (slice(0, 7), slice(7, 8), slice(8, 64)):  # by shards as whole
        own_codes, own_scales = quantize(matrix[rows], dtype)
        assert torch.equal(own_codes, codes[rows]) and torch.equal(own_scales, scales[rows])


def test_rounding_is_measured_in_parts_as_of_the_whole() -> None:
    matrix = random_matrix()
    rounded = dequantize(*quantize(matrix, torch.bfloat16))
    expected = float((rounded.float() - matrix).norm() / matrix.norm())
    whole = RoundingMeter()
    whole.add("w", matrix, rounded)
    assert find_rounding([whole.sums()])["w"] == pytest.approx(expected, rel=1e-5)
    # Two ranks, of which one reads its rows in two chunks; each is there twice.
    ranks = []
    for chunks in ([slice(0, 5), slice(5, 40)], [slice(40, 64)]):
        meter = RoundingMeter()
        for rows in chunks:
            meter.add("w", matrix[rows], rounded[rows])
        meter.add("zeros", torch.zeros(2, 64), torch.zeros(2, 64))
        ranks += [meter.sums()] * 2
    changes = find_rounding(ranks)
    assert changes["w"] == pytest.approx(expected, rel=1e-5) and changes["zeros"] == 0
    sentence = describe_rounding(changes | {"v": 0.0})
    assert "3 matrices" in sentence and f"{expected:.2%} at most (w)" in sentence
    assert f"{expected / 3:.2%} on average" in sentence


def with_values(lora: LoRASection, family: str) -> tuple[Any, Any]:
    """A model in 4 bits, filled by chunks of rows, and one with the values that these stand for,
    both with adapters.
    """
    fields = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    if FAMILIES[family].delta:
        fields["linear_value_head_dim"] = 16
    models = []
    for own in (lora, replace(lora, use_qlora=False)):
        model = build_model(hf_config(family, **fields))
        add_adapters(model, own, dtype=torch.float32)
        model.init_weights(device=CPU, max_seq_len=64)
        models.append(model)
    ours, plain = models
    assert (
        set(find_not_finite(ours)) == set(find_local_shards(ours)) == set(find_local_shards(plain))
    ), "NaN until it is filled"
    with_random_weights(plain)
    for name, held in find_local_shards(ours).items():
        values = find_local_shards(plain)[name].local
        for rows in (slice(0, 3), slice(3, len(values))):
            held.fill(rows, values[rows])
    assert find_not_finite(ours) == {}
    for name, held in find_local_shards(plain).items():
        held.stored.copy_(find_local_shards(ours)[name].local)
    for model in models:
        fill_adapter(model, lora, seed=1, start=None)
        for name, layer in find_adapted_layers(model).items():
            layer.lora_B.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return ours, plain


@pytest.mark.parametrize(
    ("family", "num_in_4_bits", "num_adapters"),
    [
        ("olmo2", 4 * 7, 4 * 3),
        ("qwen2", 4 * 7, 4 * 3),  # with biases
        # The last of four layers attends. Of the others all but `w_a` and `w_b`, which have a row a
        # head.
        ("olmo_hybrid", 3 * 8 + 7, 4 * 3),
        ("qwen3_5_text", 3 * 6 + 7, 3 * 1 + 3),
    ],
)
def test_nf4_matrix_computes_as_its_dequantised_values(
    family: str, num_in_4_bits: int, num_adapters: int
) -> None:
    ours, plain = with_values(LORA, family)
    in_4_bits = [module for module in ours.modules() if isinstance(module, FrozenLinear)]
    assert len(in_4_bits) == num_in_4_bits and all(module.weight is None for module in in_4_bits)
    others = {
        name.rpartition(".")[2]
        for name, each in ours.blocks.named_modules()
        if type(each) is torch.nn.Linear
    }
    assert others == ({"w_a", "w_b"} if FAMILIES[family].delta else set())
    assert len(find_adapted_layers(ours)) == num_adapters, (
        "all are in 4 bits, those with an adapter and others"
    )
    counts = {"tokens": 40, "labels": 30}
    assert count_step_flops(ours, counts, mean_length=40) == count_step_flops(
        plain, counts, mean_length=40
    )
    losses = [model(IDS).float().log_softmax(-1)[..., 5].sum() for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    theirs = dict(plain.named_parameters())
    trained = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    assert len(trained) == num_adapters * 2
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-6)
    merged, expected = find_merged_weights(ours), find_merged_weights(plain)
    assert set(merged) == set(expected)
    for name in merged:
        assert torch.equal(merged[name].local, expected[name].local), name


def test_layer_is_compiled_as_one_piece() -> None:
    layer = FrozenLinear(
        torch.nn.Linear(128, 8).requires_grad_(False), in_4_bits=True, dtype=torch.float32
    )
    for parameter, values in zip(
        (layer.codes, layer.scales), quantize(torch.randn(8, 128), torch.float32), strict=True
    ):
        parameter.data.copy_(values)
    x = torch.randn(5, 128, requires_grad=True)
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = call(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_levels_are_where_it_computes_and_not_with_weights_on_the_host() -> None:
    model = build_model(hf_config("olmo2", hidden_size=64, intermediate_size=128, head_dim=32))
    add_adapters(model, LORA, dtype=torch.float32)
    model.on_host = True
    model.init_weights(device=torch.device("meta"))
    in_4_bits = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    assert {(each.codes.device.type, each.pairs.device.type) for each in in_4_bits} == {
        ("cpu", "meta")
    }


def test_value_that_is_not_finite_is_found() -> None:
    ours, _ = with_values(LORA, "olmo2")
    name = "blocks.1.feed_forward.w3.weight"
    for bad, found in ((torch.nan, "NaN"), (-torch.inf, "inf")):
        values = torch.ones(find_local_shards(ours)[name].shape)
        values[4, 40] = bad
        find_local_shards(ours)[name].fill(slice(0, len(values)), values)
        assert find_not_finite(ours) == {name: found}


def test_matrix_that_nf4_cannot_hold_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"attention.w_k has 32 columns, no multiple of 64; leave it out"
    ):
        add_adapters(build_model(hf_config("llama")), LORA, dtype=torch.float32)
    words = (
        "--model_name_or_path m --output_dir o --mixer_list d 1.0 --use_lora --use_qlora "
        "--tensor_parallel_degree 2"
    )
    with pytest.raises(InputError, match="--tensor_parallel_degree 2 cannot go with --use_qlora"):
        validate_dpo(parse_run(DPOConfig, words.split()))
