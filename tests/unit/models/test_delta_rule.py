"""Layers of the gated delta rule: token by token, in chunks, over segments that branch, and against
transformers.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import olmo_core.nn.attention.flash_linear_attn_api as kernels
import pytest
import torch
import torch.nn.functional as F
import transformers

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.lora import MODULES_OF_TARGETS, LoRASection
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES
from open_instruct.models.attention.segments import Segments
from open_instruct.models.delta_rule import rule
from open_instruct.models.delta_rule.mixer import DeltaRuleConfig, DeltaRuleMixer
from open_instruct.models.delta_rule.rule import (
    DeltaRuleInputs,
    compute_by_chunks,
    gated_delta_rule,
)
from open_instruct.models.delta_rule.shape import CHUNK, DeltaShape, read_delta_shape
from open_instruct.models.delta_rule.walk import plan_walk
from open_instruct.models.hf.names import TensorNames, clean_name, split_as_in_files
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.models.lora.files import find_peft_name
from open_instruct.planning.subject.model import Adapters
from open_instruct.planning.subject.read_shape import shape_from_fields
from open_instruct.rl import run_checks
from tests.refusals import refused
from tests.unit.small_models import CPU, hf_config, new_model

pytestmark = pytest.mark.usefixtures("one_thread")

DELTA_FAMILIES = [name for name, family in FAMILIES.items() if family.delta is not None]
# Segments and prefixes: documents over several chunks, of a whole chunk, and trees that branch
# within chunks.
ROWS = {
    "documents": ((5, 150, 1, CHUNK, 2 * CHUNK + 1), (0,) * 5),
    "a tree": ((100, 3, 70, 90, 2), (0, 40, 42, 0, 90)),
    "a prefix shorter than the convolution": ((2, 5, 1, 5), (0, 1, 2, 1)),
}
D_MODEL = 16


def random_inputs(num_tokens: int, seed: int = 0) -> DeltaRuleInputs:
    generator = torch.Generator().manual_seed(seed)
    query, key, value, decay, rate = (
        torch.randn(num_tokens, 2, size, generator=generator, dtype=torch.float64)
        for size in (4, 4, 6, 1, 1)
    )
    return DeltaRuleInputs(
        query, key, value, -F.softplus(decay[..., 0]), 2 * rate[..., 0].sigmoid()
    )


def token_by_token(inputs: DeltaRuleInputs) -> torch.Tensor:
    """The recurrence of one document as the paper has it."""
    memory, read = torch.zeros(2, 4, 6, dtype=torch.float64), []
    for query, key, value, decay, rate in zip(*inputs, strict=True):
        query, key = (
            each / (each.square().sum(-1, keepdim=True) + rule.NORM_EPS).sqrt()
            for each in (query, key)
        )
        memory = decay.exp()[:, None, None] * memory
        difference = value - torch.einsum("hk,hkv->hv", key, memory)
        memory = memory + torch.einsum("h,hk,hv->hkv", rate, key, difference)
        read.append(torch.einsum("hk,hkv->hv", query, memory) / 4**0.5)
    return torch.stack(read)


def documents_of(lengths: tuple[int, ...], prefixes: tuple[int, ...]) -> list[list[int]]:
    """The tokens that each segment sees, its own last."""
    seen: list[list[int]] = []
    for stop, length, prefix in zip(accumulate(lengths), lengths, prefixes, strict=True):
        seen.append([*(seen[-1][:prefix] if seen else []), *range(stop - length, stop)])
    return seen


def test_walk_is_the_one_in_its_docstring() -> None:
    walk = plan_walk((6, 3, 2, 3), (0, 4, 6, 0), 2, CPU)
    chunks = [range(4), range(4, 6), range(6, 8), range(8, 9), range(9, 11), range(11, 14)]
    assert [[token for token in each if token < 14] for each in walk.tokens_NC.tolist()] == [
        *map(list, chunks)
    ]
    assert walk.tokens_NC.flatten()[walk.places_T].tolist() == [*range(14)]
    assert walk.goes_on_from == (None, 0, 0, 2, 2, None)
    none = 14
    assert walk.history.tolist() == [
        none,
        none,
        0,
        1,
        2,
        3,
        4,
        5,
        2,
        3,
        6,
        7,
        8,
        6,
        7,
        9,
        10,
        none,
        none,
        11,
        12,
        13,
    ]
    assert walk.history[walk.after_history_T + 2].tolist() == [*range(14)]
    with_empty = plan_walk((6, 0, 3, 2, 0, 3, 0), (0, 5, 4, 6, 2, 0, 1), 2, CPU)
    assert with_empty.goes_on_from == walk.goes_on_from
    assert all(torch.equal(*both) for both in zip(with_empty[1:], walk[1:], strict=True))


@pytest.mark.parametrize(("lengths", "prefixes"), ROWS.values(), ids=ROWS.keys())
def test_delta_rule_in_chunks_equals_token_by_token(
    lengths: tuple[int, ...], prefixes: tuple[int, ...]
) -> None:
    inputs = random_inputs(sum(lengths))
    ours = compute_by_chunks(inputs, plan_walk(lengths, prefixes, 3, CPU))
    for length, seen in zip(lengths, documents_of(lengths, prefixes), strict=True):
        expected = token_by_token(DeltaRuleInputs(*(each[seen] for each in inputs)))[-length:]
        torch.testing.assert_close(ours[seen[-length:]], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("lengths", "prefixes"), ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("is_fused", [False, True])
def test_packed_is_separate(
    is_fused: bool, lengths: tuple[int, ...], prefixes: tuple[int, ...]
) -> None:
    """The whole layer, values and gradients, as closely as float64 can tell."""
    torch.manual_seed(0)
    shape = DeltaShape(
        num_key_heads=2,
        num_value_heads=4,
        key_head_dim=4,
        value_head_dim=6,
        conv_kernel_dim=4,
        is_fused=is_fused,
    )
    config = DeltaRuleConfig(shape=shape, norm_eps=1e-5, doubles_rates=not is_fused)
    layer: DeltaRuleMixer = config.build(D_MODEL).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert {name: tuple(each.shape) for name, each in layer.named_parameters()} == shape.tensors(
        D_MODEL
    )
    x_TD = torch.randn(sum(lengths), D_MODEL, dtype=torch.float64, requires_grad=True)
    weights_TD = torch.randn_like(x_TD)

    def gradients(output_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((output_TD * weights_TD).sum(), (x_TD, *layer.parameters()))

    def run(
        rows: torch.Tensor, lengths: tuple[int, ...], prefixes: tuple[int, ...]
    ) -> torch.Tensor:
        return layer(
            rows.unsqueeze(0), cu_doc_lens=Segments.from_lengths(lengths, prefixes, device=CPU)
        ).squeeze(0)

    packed = run(x_TD, lengths, prefixes)
    alone = [
        run(x_TD[seen], (len(seen),), (0,))[-length:]
        for length, seen in zip(lengths, documents_of(lengths, prefixes), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradients(packed), gradients(torch.cat(alone)), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    config = hf_config(family, initializer_range=0.1)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names, model = TensorNames(config), new_model(family)
    theirs = split_as_in_files(reference.state_dict())
    model.load_state_dict({name: theirs[hf_name] for name, hf_name in names})
    ids_BT = torch.randint(
        1, config.vocab_size, (2, CHUNK + 20), generator=torch.Generator().manual_seed(1)
    )
    expected = reference(ids_BT, labels=ids_BT).loss
    ours = F.cross_entropy(model(ids_BT)[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    expected.backward()
    ours.backward()
    of_theirs = {
        name: parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
    }
    gradients = split_as_in_files(of_theirs)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[names.hf_name(name)], atol=1e-5, rtol=1e-5, msg=name
        )


WHOLE = {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            WHOLE | {"linear_num_value_heads": 3},
            ("bad_model", None, "linear_num_value_heads", "3", "linear_num_key_heads"),
        ),
        ({"linear_key_head_dim": 0}, ("bad_model", None, "linear_key_head_dim", "0")),
        (
            {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 2.5},
            ("bad_model", None, "linear_conv_kernel_dim", "2.5"),
        ),
        ({}, ("bad_model", None, "linear_value_head_dim")),
    ],
)
def test_shape_that_no_layer_has_is_refused(fields: dict[str, Any], named: tuple[Any, ...]) -> None:
    usual = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    with refused(*named):
        read_delta_shape(usual | fields, "config.json", is_fused=False)


@pytest.mark.parametrize(
    ("dtype", "prefix", "has_fla", "by_kernel"),
    [
        (torch.bfloat16, 0, True, True),
        (torch.float32, 0, True, False),
        (torch.bfloat16, 2, True, False),
        (torch.bfloat16, 0, False, False),
    ],
)
def test_delta_rule_calls_the_kernel_on_cuda(
    dtype: torch.dtype, prefix: int, has_fla: bool, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the borders of documents that have tokens, one tensor for all layers; never for a
    prefix.
    """
    inputs, called = random_inputs(9), []
    inputs = DeltaRuleInputs(*(each.to(dtype) for each in inputs[:3]), inputs.decay, inputs.rate)

    def dispatch(**given: Any) -> tuple[torch.Tensor, None]:
        called.append(given)
        return given["v"], None

    monkeypatch.setattr(kernels, "has_fla", lambda: has_fla)
    monkeypatch.setattr(kernels, "dispatch_chunk_gated_delta_rule", dispatch)
    monkeypatch.setattr(rule, "compute_by_chunks", lambda inputs, walk: inputs.value + 1)
    on_cuda = inputs._replace(query=SimpleNamespace(is_cuda=True, unsqueeze=inputs.query.unsqueeze))  # type: ignore[arg-type]
    lengths, prefixes = (4, 5, 0), (0, prefix, 0)
    segments, walk = (
        Segments.from_lengths(lengths, prefixes, device=CPU),
        plan_walk(lengths, prefixes, 3, CPU),
    )
    read = gated_delta_rule(on_cuda, segments, walk)
    assert torch.equal(read, inputs.value if by_kernel else inputs.value + 1)
    assert bool(called) is by_kernel
    if by_kernel:
        assert called[0]["cu_seqlens"] is walk.borders and walk.borders.tolist() == [0, 4, 9]
        assert called[0]["use_qk_l2norm_in_kernel"]
        assert torch.equal(called[0]["g"][0], inputs.decay) and torch.equal(
            called[0]["beta"][0], inputs.rate
        )


@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_adapters_stand_beside_the_matrices_that_a_layer_has(family: str) -> None:
    """In a plan, too, and under names that peft has for them."""
    config, lora = hf_config(family), LoRASection(use_lora=True, lora_r=2)
    model, names = new_model(family), TensorNames(config)
    add_adapters(model, lora, dtype=torch.float32)
    shapes = {clean_name(name): tuple(each.shape) for name, each in model.named_parameters()}
    shape = replace(
        shape_from_fields(config.to_dict(), name="tiny", where="config.json"),
        adapters=Adapters(
            rank=2, modules=tuple(MODULES_OF_TARGETS[target] for target in lora.targets)
        ),
    )
    assert {each.name: each.shape for each in shape.parameters} == shapes
    adapted = {name.removesuffix(".lora_A") for name in shapes if name.endswith("lora_A")}
    of_mixers = [
        {name.split(".")[-1] for name in adapted if name.startswith(f"blocks.{i}.attention")}
        for i in (0, 3)
    ]
    all_four = {"w_q", "w_k", "w_v", "w_out"}
    assert of_mixers == [set() if FAMILIES[family].delta == "fused" else all_four, all_four]
    hf_modules = {find_peft_name(f"{name}.lora_A", names).split(".")[-3] for name in adapted}
    assert hf_modules == set(lora.targets)


FOR_A_CPU = "--vllm_dtype bfloat16 --no_vllm_enable_prefix_caching"


def check_engine(hf_config: Any, config: GRPOConfig) -> None:
    run_checks.check_engine(
        hf_config,
        config.fleet,
        engine_dtype=config.engine_dtype,
        sends_adapter=config.sent_adapter is not None,
    )


@pytest.mark.parametrize(
    ("family", "flags", "has_torchvision", "on_gpu", "named"),
    [
        ("olmo_hybrid", "", False, False, "layers of Olmo-Hybrid are for GPUs"),
        ("qwen3_5_text", FOR_A_CPU, True, False, None),
        (
            "qwen3_5_text",
            "--vllm_dtype float32",
            True,
            False,
            "bfloat16 alone: give --vllm_dtype bfloat16",
        ),
        (
            "qwen3_5_text",
            "--vllm_dtype bfloat16",
            True,
            False,
            "give --no_vllm_enable_prefix_caching",
        ),
        (
            "qwen3_5_text",
            f"{FOR_A_CPU} --use_lora --lora_sync adapter",
            True,
            False,
            "give --lora_sync merged",
        ),
        ("qwen3_5_text", "", False, True, "imports torchvision, which is not installed"),
        ("qwen3_5_text", "", True, True, None),
        ("olmo_hybrid", "", False, True, None),
        ("qwen3", "", False, False, None),
    ],
)
def test_model_that_engines_cannot_run_is_refused_before_they_start(
    family: str,
    flags: str,
    has_torchvision: bool,
    on_gpu: bool,
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "--model_name_or_path m --dataset_mixer_list rows.jsonl 1.0 --output_dir out"
    config = parse_run(GRPOConfig, f"{words} {flags}".split())
    monkeypatch.setattr(run_checks, "find_spec", lambda name: name if has_torchvision else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    hf_config: Any = SimpleNamespace(
        model_type=family, linear_key_head_dim=128, linear_value_head_dim=128
    )
    with nullcontext() if named is None else pytest.raises(InputError, match=named):
        check_engine(hf_config, config)


def test_engine_on_a_cpu_takes_heads_of_some_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        f"--model_name_or_path m --dataset_mixer_list rows.jsonl 1.0 --output_dir out {FOR_A_CPU}"
    )
    config = parse_run(GRPOConfig, words.split())
    monkeypatch.setattr(run_checks, "find_spec", lambda name: name)
    hf_config: Any = SimpleNamespace(
        model_type="qwen3_5_text", linear_key_head_dim=32, linear_value_head_dim=32
    )
    with refused("input", None, "64", "128", "32"):
        check_engine(hf_config, config)
    for size in SIZES.values():  # those of the models that there are to try it with
        tiny = tiny_config("qwen3_5_text", size, vocab_size=size["vocab_size"], tie=False)
        check_engine(tiny, config)
