"""Planned bytes of parameters, gradients and optimizer states against what a rank of a real model
really holds.

The model is built and sharded as in a run, in a process group without other processes; rank by rank
it takes one step with whatever the collectives leave in the buffers, and the storages it then holds
are added up.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import build_world_mesh
from torch.distributed.tensor import DTensor

from open_instruct.batching.prefixes import FullRows
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.lora import MODULES_OF_TARGETS, LoRASection
from open_instruct.config.sections import OptimSection
from open_instruct.core.families import FAMILIES
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.build import build_model
from open_instruct.models.experts import routed
from open_instruct.models.hf.names import clean_name
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.parallel.data_parallel import build_parallel_configs
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.memory.state import state_bytes
from open_instruct.planning.subject.model import Adapters, ModelShape
from open_instruct.planning.subject.read_shape import shape_from_fields
from open_instruct.planning.subject.workload import Scoring, Workload
from open_instruct.training.olmo_core.fsdp2 import hand_gradients_over
from open_instruct.training.optim.optimizers import build_optimizer_config
from open_instruct.training.parallelize import Parallelism, parallelize
from tests.tiers import mark_extended
from tests.unit.conftest import JoinAs
from tests.unit.planning.test_planning_memory import phases_of

CPU = torch.device("cpu")
NUM_TOKENS = 16
# Nothing in it is a multiple of 8, 24, 64 or 1,024 shards, and no dimension equals another.
UNEVEN = {
    "hidden_size": 132,
    "intermediate_size": 214,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 502,
    "sliding_window": 8,
}
TIED_OR_NOT = [
    ("olmo2", False),
    ("olmo3", False),
    ("qwen2", True),
    ("qwen3", True),
    ("qwen3", False),
    ("llama", True),
    ("llama", False),
    ("qwen3_moe", False),
]
WORKLOAD = Workload(
    algorithm="sft",
    tokens_per_microbatch=NUM_TOKENS,
    rows=FullRows(length=NUM_TOKENS),
    label_tokens_per_microbatch=NUM_TOKENS,
    num_microbatches=1,
)


def layout_of(num_ranks: int, **degrees: int) -> ShardLayout:
    return resolve_layout([8] * (num_ranks // 8) if num_ranks % 8 == 0 else [num_ranks], **degrees)  # type: ignore[arg-type]


# One group over all ranks where nothing is said, so that shards get as small as they can.
LAYOUTS = {
    "1": layout_of(1),
    "2": layout_of(2),
    "8": layout_of(8),
    "8 as 2 replicas": layout_of(8, fsdp_num_replicas=2),
    "8 copies": layout_of(8, fsdp_shard_degree=1),
    "8 tensor 2": layout_of(8, tensor_parallel_degree=2),
    "24": layout_of(24, fsdp_num_replicas=1),
    "24 tensor 2": layout_of(24, tensor_parallel_degree=2, fsdp_num_replicas=1),
    "64": layout_of(64, fsdp_num_replicas=1),
    "64 as 4 replicas": layout_of(64, fsdp_num_replicas=4),
    "1024": layout_of(1024, fsdp_num_replicas=1),
    "1024 as 128 replicas": layout_of(1024),
    "1024 tensor 2": layout_of(1024, tensor_parallel_degree=2, fsdp_num_replicas=8),
}


def config_of(family: str, is_tied: bool, size: dict[str, int] = UNEVEN) -> Any:
    if FAMILIES[family].expert_size is not None:
        # Experts are multiples of 8 wide.
        size = {**size, "hidden_size": 136, "intermediate_size": 4 * 56}
    return tiny_config(family, size, vocab_size=size["vocab_size"], tie=is_tied)  # type: ignore[arg-type]


def shape_of(hf_config: Any, adapters: Adapters | None = None) -> ModelShape:
    return replace(
        shape_from_fields(hf_config.to_dict(), name="tiny", where="config.json"), adapters=adapters
    )


def sharded_model(hf_config: Any, layout: ShardLayout, *, lora: LoRASection | None = None) -> Any:
    """As a run builds it."""
    configs = build_parallel_configs(layout, param_dtype="bfloat16")
    dp, tp = configs["dp"], configs["tp"]
    model = build_model(hf_config)
    if lora is not None:
        add_adapters(model, lora, dtype=torch.bfloat16)
    parallelism = Parallelism(
        mesh=build_world_mesh(dp=dp, tp=tp, device_type="cpu"),
        tensor_parallel=tp is not None,
        sharding=dp,
        splits_experts=layout.expert_parallel_degree > 1,
    )
    parallelize(model, parallelism)
    model.init_weights(max_seq_len=NUM_TOKENS, device=CPU)
    return model


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of all storages behind `tensors`, each once."""
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in tensors
        if tensor is not None
    ]
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in local
    }
    return sum(storages.values())


def held_after_a_step(model: Any, optimizer: str, computing: Any = None) -> tuple[int, int, int]:
    optim = build_optimizer_config(OptimSection(optimizer=optimizer), device=CPU, names=()).build(
        model
    )  # type: ignore[arg-type]
    ids_BT = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    (computing or model)(
        ids_BT, labels=ids_BT, loss_reduction="sum", return_logits=False
    ).loss.backward()
    gradients = storage_bytes(parameter.grad for parameter in model.parameters())
    if optimizer == "skip_step_adamw":
        optim.latest_loss = optim.latest_grad_norm = torch.zeros(())
    optim.step()
    states = [
        value
        for state in optim.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return storage_bytes(model.parameters()), gradients, storage_bytes(states)


CASES = [
    *(("olmo2", False, name) for name in LAYOUTS),
    *(("qwen3", True, name) for name in ("24 tensor 2", "1024")),
    *(("qwen3_moe", False, name) for name in ("8 as 2 replicas", "24")),
    *(
        (family, is_tied, "24")
        for family, is_tied in [("olmo3", False), ("qwen3", False), ("llama", True)]
    ),
]
FEW_CASES = [
    ("olmo2", False, "8 as 2 replicas"),
    ("qwen3", True, "24 tensor 2"),
    ("qwen3_moe", False, "24"),
]


@pytest.mark.parametrize(("family", "is_tied", "layout_name"), mark_extended(CASES, but=FEW_CASES))
def test_state_is_what_the_sharded_model_holds(
    join_as: JoinAs, family: str, is_tied: bool, layout_name: str
) -> None:
    layout, hf_config = LAYOUTS[layout_name], config_of(family, is_tied)
    for rank in sorted({0, layout.world_size * 2 // 3, layout.world_size - 1}):
        join_as(rank, layout.world_size)
        held = held_after_a_step(sharded_model(hf_config, layout), "adamw")
        assert state_bytes(shape_of(hf_config), layout, WORKLOAD, rank=rank) == held, f"rank {rank}"


# Of the last 2 experts of a rank, or of one, replicas have a part.
@pytest.mark.parametrize("shard_degree", mark_extended([2, 8], but=[2]))
def test_state_of_experts_that_are_split(
    join_as: JoinAs, shard_degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "all_to_all_single", lambda counts, *_: counts)
    monkeypatch.setattr(routed, "all_to_all_single_autograd", lambda rows, *_: rows.clone())
    layout = layout_of(24, fsdp_shard_degree=shard_degree, expert_parallel_degree=shard_degree)
    hf_config = config_of("qwen3_moe", False, SIZES["tiny"])
    for rank in (0, 1, 10, 23):
        join_as(rank, layout.world_size)
        model = sharded_model(hf_config, layout)
        stacks = [each for each in model.parameters() if each.ndim == 3]
        assert stacks and all("Strided" in str(each.placements) for each in stacks)
        assert state_bytes(shape_of(hf_config), layout, WORKLOAD, rank=rank) == held_after_a_step(
            model, "adamw"
        )


# Fewer rows of a half than there are shards, and more.
LORAS = {
    "all": (
        LoRASection(use_lora=True, lora_r=12),
        Adapters(rank=12, modules=tuple(MODULES_OF_TARGETS.values())),
    ),
    "some": (
        LoRASection(use_lora=True, lora_r=7, lora_target_modules=["v_proj", "down_proj"]),
        Adapters(rank=7, modules=("attention.w_v", "feed_forward.w2")),
    ),
}


@pytest.mark.parametrize(
    ("family", "is_tied", "layout_name", "name"),
    mark_extended(
        [
            ("olmo2", False, "1", "all"),
            ("olmo3", False, "2", "all"),
            ("llama", False, "8 as 2 replicas", "some"),
            ("qwen2", True, "24", "all"),
            ("qwen3", True, "24 tensor 2", "all"),
        ],
        but=[("olmo2", False, "1", "all"), ("llama", False, "8 as 2 replicas", "some")],
    ),
)
def test_frozen_model_has_states_for_adapters_only(
    join_as: JoinAs, family: str, is_tied: bool, layout_name: str, name: str
) -> None:
    layout, hf_config, (lora, adapters) = (
        LAYOUTS[layout_name],
        config_of(family, is_tied),
        LORAS[name],
    )
    shape = shape_of(hf_config, adapters)
    for rank in sorted({0, layout.world_size - 1}):
        join_as(rank, layout.world_size)
        model = sharded_model(hf_config, layout, lora=lora)
        real = [
            (clean_name(name), tuple(each.shape), each.requires_grad)
            for name, each in model.named_parameters()
        ]
        assert [(each.name, each.shape, each.is_trained) for each in shape.parameters] == real
        assert state_bytes(shape, layout, WORKLOAD, rank=rank) == held_after_a_step(
            model, "adamw"
        ), f"rank {rank}"


@pytest.mark.parametrize(
    "family", mark_extended(["qwen2", "olmo_hybrid", "qwen3_5_text"], but=["qwen2"])
)
@pytest.mark.parametrize("layout_name", ["1", "8 as 2 replicas", "24"])
def test_frozen_model_in_4_bits(join_as: JoinAs, layout_name: str, family: str) -> None:
    """Some of its matrices have adapters, and the blocks are in 4 bits; 24 ranks have uneven
    parts.
    """
    layout, (lora, adapters) = LAYOUTS[layout_name], LORAS["some"]
    hf_config = config_of(family, False, {**UNEVEN, "hidden_size": 192, "intermediate_size": 320})
    shape = shape_of(hf_config, replace(adapters, in_4_bits=True))
    for rank in sorted({0, layout.world_size - 1}):
        join_as(rank, layout.world_size)
        model = sharded_model(hf_config, layout, lora=replace(lora, use_qlora=True))
        held = held_after_a_step(model, "adamw")
        assert state_bytes(shape, layout, WORKLOAD, rank=rank) == held, f"rank {rank}"
        assert held[0] < state_bytes(shape_of(hf_config, adapters), layout, WORKLOAD, rank=rank)[0]


def test_frozen_model_beside_is_what_it_holds(join_as: JoinAs) -> None:
    """A reference policy, and a teacher of another config whose head's matrix is whole."""
    layout = LAYOUTS["24 tensor 2"]
    beside = {
        "reference policy": (config_of("olmo2", False), 1),
        "teacher": (config_of("llama", False, SIZES["tiny"]), 0),
    }
    scorings = [
        Scoring(shape=shape_of(hf_config), stands_as=name, num_values=num_values)
        for name, (hf_config, num_values) in beside.items()
    ]
    workload = replace(WORKLOAD, scorings=tuple(scorings))
    phases = phases_of(scorings[0].shape, layout, workload)
    for name, (hf_config, num_values) in beside.items():
        join_as(0, layout.world_size)
        model = sharded_model(hf_config, layout)
        head_VD = torch.empty(hf_config.vocab_size, hf_config.hidden_size, dtype=torch.bfloat16)
        held = storage_bytes([*model.parameters(), *([] if num_values else [head_VD])])
        assert phases["backward"][name] == held, name


# Rows in blocks of 64, of 32 where tensor ranks cut them, and of 4, which is too few; some matrices
# are too small.
IN_BLOCKS = {**UNEVEN, "hidden_size": 192, "intermediate_size": 320}


@pytest.mark.parametrize(
    ("optimizer", "layout_name", "size"),
    [
        pytest.param("skip_step_adamw", "24", UNEVEN, marks=pytest.mark.extended),
        ("muon", "24", UNEVEN),
        ("adamw_8bit", "1", IN_BLOCKS),
        ("adamw_8bit", "24", IN_BLOCKS),
        pytest.param("adamw_8bit", "24 tensor 2", IN_BLOCKS, marks=pytest.mark.extended),
        pytest.param("adamw_8bit", "24", UNEVEN, marks=pytest.mark.extended),
    ],
)
def test_state_of_other_optimizers(
    join_as: JoinAs,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    layout_name: str,
    size: dict[str, int],
) -> None:
    # Pretended ranks send nothing, and refuse one that has nothing to send.
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_: None)
    layout, hf_config = LAYOUTS[layout_name], config_of("olmo2", False, size)
    workload = replace(WORKLOAD, optimizer=optimizer)
    for rank in sorted({0, layout.world_size - 1}):
        join_as(rank, layout.world_size)
        held = held_after_a_step(sharded_model(hf_config, layout), optimizer)
        assert state_bytes(shape_of(hf_config), layout, workload, rank=rank) == held, f"rank {rank}"


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_state_of_one_gpu_without_sharding(param_dtype: str) -> None:
    """The masters, and in bfloat16 the copy that computes."""
    hf_config = config_of("olmo2", False)
    masters = build_model(hf_config, init_device="cpu")
    copy = None
    if param_dtype == "bfloat16":
        copy = build_model(hf_config, init_device="cpu").to(torch.bfloat16)
        hand_gradients_over(copy, masters)
    layout = resolve_layout([1], single_device=True)
    parameters, gradients, optimizer = held_after_a_step(masters, "adamw", computing=copy)
    parameters += storage_bytes(copy.parameters()) if copy else 0
    workload = replace(WORKLOAD, param_dtype=param_dtype)
    assert state_bytes(shape_of(hf_config), layout, workload) == (parameters, gradients, optimizer)


@pytest.mark.parametrize(
    ("family", "is_tied", "fields"),
    [
        *((*each, {}) for each in TIED_OR_NOT),
        ("qwen3_moe", False, {"mlp_only_layers": [0], "num_hidden_layers": 3}),
    ],
)
def test_parameters_are_those_of_the_model(
    family: str, is_tied: bool, fields: dict[str, Any]
) -> None:
    hf_config = config_of(family, is_tied)
    for name, value in fields.items():
        setattr(hf_config, name, value)
    model, shape = build_model(hf_config), shape_of(hf_config)
    real = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert [(parameter.name, parameter.shape) for parameter in shape.parameters] == [*real.items()]
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    # Embeddings that are tied belong to the root.
    in_units = sum(
        unit.count * sum(each.num_params for each in unit.parameters) for unit in shape.units
    )
    assert in_units == shape.num_params


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_of_the_model(family: str) -> None:
    hf_config = config_of(family, False, SIZES["tiny"])
    backends = [attention.backend for attention in build_model(hf_config).attentions]
    real = tuple(
        None if backend.window_size[0] < 0 else backend.window_size[0] + 1 for backend in backends
    )
    assert shape_of(hf_config).windows == real
