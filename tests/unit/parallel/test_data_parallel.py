"""Our groups against the ones OLMo-core and FSDP2 really build, on a process group without
processes.
"""

from typing import Any

import pytest
import torch
from olmo_core.config import DType
from olmo_core.distributed.parallel import (
    DataParallelType,
    build_world_mesh,
    get_dp_mesh,
    get_dp_model_mesh,
)
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import Transformer, TransformerConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelWrappingStrategy
from olmo_core.train.train_module.transformer.common import parallelize_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.data_parallel import build_parallel_configs
from open_instruct.parallel.layout import resolve_layout
from tests.unit.conftest import JoinAs

LAYOUTS = {
    "two nodes": resolve_layout([4, 4]),
    "unequal nodes": resolve_layout([2, 4]),
    "groups of two": resolve_layout([8], fsdp_shard_degree=2),
    "not sharded": resolve_layout([4], fsdp_shard_degree=1),
    "one replica": resolve_layout([4, 4], fsdp_num_replicas=1),
    "tensor": resolve_layout([4, 4], tensor_parallel_degree=2),
    "tensor only": resolve_layout([2, 2], tensor_parallel_degree=2),
    "context": resolve_layout([4, 4], context_parallel_degree=2),
    "context and tensor": resolve_layout(
        [8, 8], context_parallel_degree=2, tensor_parallel_degree=2
    ),
}


def build_mesh(layout: ShardLayout) -> DeviceMesh:
    return build_world_mesh(**build_parallel_configs(layout), device_type="cpu")


def parallelized(layout: ShardLayout, *, prefetch_factor: int = 0) -> Transformer:
    """Four blocks on the meta device: what they hold is not looked at here."""
    config = TransformerConfig.olmo2_190M(
        vocab_size=96, n_layers=4, attn_backend=AttentionBackendName.torch
    )
    model = config.build(init_device="meta")
    model.init_weights = lambda **_: None  # type: ignore[assignment, method-assign]
    configs = build_parallel_configs(layout, prefetch_factor=prefetch_factor)
    return parallelize_model(
        model,
        world_mesh=build_mesh(layout),
        device=torch.device("meta"),
        max_sequence_length=16,
        rank_microbatch_size=16,
        dp_config=configs["dp"],
        tp_config=configs["tp"],
    )


def group_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> list[int]:
    return next(list(group) for group in groups if rank in group)


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_those_of_the_world_mesh(name: str, join_as: JoinAs) -> None:
    layout = LAYOUTS[name]
    for rank in range(layout.world_size):
        join_as(rank, layout.world_size)
        mesh = build_mesh(layout)
        model_mesh = get_dp_model_mesh(mesh)
        assert model_mesh.mesh_dim_names is not None
        replicate, shard = model_mesh.mesh_dim_names
        assert model_mesh[shard].mesh.tolist() == group_of(rank, layout.shard_groups)
        assert model_mesh[replicate].mesh.tolist() == group_of(rank, layout.replica_groups)
        assert get_dp_mesh(mesh).size() == layout.data_parallel_world_size
        if layout.tensor_parallel_degree > 1:
            assert mesh["tp"].mesh.tolist() == group_of(rank, layout.tensor_groups)
        if layout.context_parallel_degree > 1:
            assert mesh["cp"].mesh.tolist() == group_of(rank, layout.context_groups)


@pytest.mark.parametrize("name", LAYOUTS)
def test_olmo_core_keeps_the_degrees(name: str) -> None:
    layout = LAYOUTS[name]
    config = build_parallel_configs(layout)["dp"]
    assert config is not None
    assert config.get_replicate_and_shard_degree(layout.data_parallel_world_size) == (
        layout.num_replicas,
        layout.shard_degree,
    )


@pytest.mark.parametrize("name", ["two nodes", "unequal nodes", "tensor", "not sharded"])
def test_fsdp_shards_a_model_by_the_shard_degree(name: str, join_as: JoinAs) -> None:
    layout = LAYOUTS[name]
    join_as(layout.world_size - 1, layout.world_size)
    weight = parallelized(layout).get_parameter("blocks.0.feed_forward.w1.weight")
    assert isinstance(weight, DTensor)
    split = layout.shard_degree * layout.tensor_parallel_degree
    assert weight.to_local().numel() == weight.numel() / split


def test_blocks_are_gathered_ahead_of_their_turn(join_as: JoinAs) -> None:
    layout = LAYOUTS["two nodes"]
    join_as(0, layout.world_size)
    model = parallelized(layout, prefetch_factor=2)
    states: list[Any] = [block._get_fsdp_state() for block in model.blocks.values()]  # type: ignore[operator, union-attr]
    ahead = [
        [states.index(other) for other in state._states_to_forward_prefetch] for state in states
    ]
    assert ahead == [[1, 2], [2, 3], [3], []]


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_config_is_hsdp_over_blocks(param_dtype: str) -> None:
    config = build_parallel_configs(resolve_layout([8, 8]), param_dtype=param_dtype)["dp"]
    assert config is not None
    assert config.name == DataParallelType.hsdp
    assert config.wrapping_strategy == TransformerDataParallelWrappingStrategy.blocks
    assert (config.num_replicas, config.shard_degree) == (2, 8)
    assert (config.param_dtype, config.reduce_dtype) == (param_dtype, DType.float32)


def test_unsplit_dimension_has_no_config() -> None:
    one_device = resolve_layout([1], single_device=True)
    assert build_parallel_configs(one_device) == {"dp": None, "tp": None, "cp": None}
    assert build_parallel_configs(resolve_layout([8]))["cp"] is None
