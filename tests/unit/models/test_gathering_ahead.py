"""Which blocks FSDP gathers ahead of their turn, whatever is recomputed in the backward pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from open_instruct.models.build import build_model
from open_instruct.models.transformer import SegmentTransformer
from tests.unit.conftest import JoinAs
from tests.unit.small_models import hf_config

NUM_BLOCKS = 4
RECOMPUTED: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "whole blocks": {"mode": Mode.full},
    "modules": {"mode": Mode.selected_modules, "modules": ["blocks.*.feed_forward"]},
}


def shard_blocks(
    *, family: str, recomputed: dict[str, Any] | None, prefetch_factor: int
) -> SegmentTransformer:
    model = build_model(hf_config(family))
    if recomputed is not None:
        model.apply_activation_checkpointing(**recomputed)
    mesh = init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    model.apply_fsdp(
        mesh,
        torch.bfloat16,
        torch.float32,
        prefetch_factor=prefetch_factor,
        splits_experts=True,
    )
    return model


def find_unit(block: torch.nn.Module) -> FSDPModule:
    """What FSDP gathers of a block: the outermost module that it shards."""
    return next(module for module in block.modules() if isinstance(module, FSDPModule))


@pytest.mark.parametrize("family", ["olmo2", "qwen3_moe"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_blocks_are_gathered_ahead_whatever_is_recomputed(
    name: str, family: str, join_as: JoinAs
) -> None:
    join_as(0, 2)
    model = shard_blocks(family=family, recomputed=RECOMPUTED[name], prefetch_factor=2)
    states: list[Any] = [find_unit(block)._get_fsdp_state() for block in model.blocks.values()]
    ahead = [
        [states.index(other) for other in state._states_to_forward_prefetch] for state in states
    ]
    assert ahead == [[1, 2], [2, 3], [3], []]
    assert len(states) == NUM_BLOCKS
