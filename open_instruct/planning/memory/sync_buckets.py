"""The buckets in which weights go to the engines, cut as `weight_sync/manifest.py` cuts them."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

from open_instruct.core.families import FULL, LINEAR
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.weight_buckets import plan_buckets
from open_instruct.models.hf.names import TensorNames, is_adapter_name, is_expert_stack
from open_instruct.planning.memory.state import chunk_rows, tensor_local_shape
from open_instruct.planning.subject.model import ModelShape, ParameterShape
from open_instruct.planning.subject.workload import Workload


class RankRows(NamedTuple):
    """So many ranks that have equally many rows of a parameter each; a row has `width` values."""

    num_ranks: int
    num_rows: int
    width: int


def sync_buckets(
    shape: ModelShape, layout: ShardLayout, workload: Workload
) -> Iterator[tuple[int, int]]:
    """The bytes of the first rank and of all ranks in each bucket."""
    item_bytes = workload.sync_bytes_per_param
    rows: dict[str, list[RankRows]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for parameter in _list_sent(shape, workload):
        name = parameter.name
        rows[name] = list(split_rows(layout, parameter))
        most_rows = max(part.num_rows for part in rows[name])
        sizes[name] = (parameter.num_params * item_bytes, most_rows)
    for names, piece, num_pieces in plan_buckets(sizes, workload.sync_bucket_bytes):
        own_values = 0
        all_values = 0
        for name in names:
            for index, part in enumerate(rows[name]):
                begin = piece * part.num_rows // num_pieces
                end = (piece + 1) * part.num_rows // num_pieces
                num_values = (end - begin) * part.width
                all_values += part.num_ranks * num_values
                if index == 0:
                    own_values += num_values
        yield own_values * item_bytes, all_values * item_bytes


def _list_sent(shape: ModelShape, workload: Workload) -> list[ParameterShape]:
    """The parameters that travel: adapters in the model's order, others in that of the names."""
    if workload.sends_adapter:
        return [each for each in shape.parameters if is_adapter_name(each.name)]
    by_name: dict[str, ParameterShape] = {}
    for parameter in shape.parameters:
        by_name |= {each.name: each for each in _split_stack(parameter)}
    layer_types = [LINEAR if layer.delta else FULL for layer in shape.layers]
    dense_layers = [number for number, layer in enumerate(shape.layers) if not layer.num_experts]
    fields = SimpleNamespace(
        model_type=shape.family,
        tie_word_embeddings=shape.is_tied,
        num_hidden_layers=shape.num_layers,
        layer_types=layer_types,
        mlp_only_layers=dense_layers,
        num_experts=shape.num_experts,
    )
    return [by_name[name] for name in TensorNames(fields).olmo_core_names]


def _split_stack(parameter: ParameterShape) -> list[ParameterShape]:
    """The parameter, or each matrix of a stack of them, which is whole on one rank."""
    if not is_expert_stack(parameter.name):
        return [parameter]
    num_matrices, *shape = parameter.shape
    return [
        replace(
            parameter,
            name=f"{parameter.name}.{index}",
            shape=tuple(shape),
            stack_place=(index, num_matrices),
        )
        for index in range(num_matrices)
    ]


def split_rows(layout: ShardLayout, parameter: ParameterShape) -> Iterator[RankRows]:
    """The rows of one parameter that ranks have, in the order of ranks.

    Counts one copy of a model that FSDP2 shards, where the first rank has most rows.
    """
    if parameter.stack_place is not None:
        index, num_matrices = parameter.stack_place
        num_shards = layout.shard_group_size
        if layout.expert_parallel_degree > 1:
            num_shards = layout.world_size
        if index >= chunk_rows(num_matrices, num_shards, 0):
            yield RankRows(num_ranks=1, num_rows=0, width=0)
        num_rows, width = parameter.shape
        yield RankRows(num_ranks=1, num_rows=num_rows, width=width)
        return
    degree = layout.tensor_parallel_degree
    num_parts = 1 if parameter.tensor_axis is None else degree
    for tensor_rank in range(num_parts):
        num_rows, *others = tensor_local_shape(parameter, degree, tensor_rank)
        width = prod(others)
        chunk = chunk_rows(num_rows, layout.shard_group_size, 0)
        num_whole, num_left = divmod(num_rows, max(1, chunk))
        yield RankRows(num_ranks=num_whole, num_rows=chunk, width=width)
        yield RankRows(num_ranks=1, num_rows=num_left, width=width)
