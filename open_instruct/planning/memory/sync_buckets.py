"""The buckets in which weights go to the engines, cut as `weights/manifest.py` cuts them."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from types import SimpleNamespace

from open_instruct.families import FULL, LINEAR
from open_instruct.models.hf.names import TensorNames, is_of_adapter, is_stack
from open_instruct.planning.memory.state import chunk_rows, tensor_local_shape
from open_instruct.planning.subject.model import ModelShape, ParameterShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.shard_layout import ShardLayout
from open_instruct.weight_sync import runs_of


def sync_buckets(shape: ModelShape, layout: ShardLayout, workload: Workload) -> Iterator[tuple[int, int]]:
    """The bytes of the first rank and of all ranks in each bucket."""
    sent = _sent(shape, workload)
    rows = {each.name: list(rows_of_ranks(layout, each)) for each in sent}
    each_bytes = workload.sync_bytes_per_param
    sizes = {each.name: (each.num_params * each_bytes, max(n for _, n, _ in rows[each.name])) for each in sent}
    for names, piece, num_pieces in runs_of(sizes, workload.sync_bucket_bytes):
        own = whole = 0
        for name in names:
            cut = [((piece + 1) * n // num_pieces - piece * n // num_pieces) * width for _, n, width in rows[name]]
            own += cut[0]
            whole += sum(num_ranks * size for (num_ranks, *_), size in zip(rows[name], cut, strict=True))
        yield own * each_bytes, whole * each_bytes


def _sent(shape: ModelShape, workload: Workload) -> list[ParameterShape]:
    """The parameters that travel, in their order: adapters in the model's, others in that of the names."""
    if workload.sends_adapter:
        return [each for each in shape.parameters if is_of_adapter(each.name)]
    by_name = {each.name: each for parameter in shape.parameters for each in _in_files(parameter)}
    fields = {"model_type": shape.family, "tie_word_embeddings": shape.is_tied, "num_hidden_layers": shape.num_layers}
    fields["layer_types"] = [LINEAR if layer.delta else FULL for layer in shape.layers]
    fields["mlp_only_layers"] = [number for number, layer in enumerate(shape.layers) if not layer.num_experts]
    fields["num_experts"] = shape.num_experts
    return [by_name[name] for name in TensorNames(SimpleNamespace(**fields)).olmo_core_names]


def _in_files(parameter: ParameterShape) -> list[ParameterShape]:
    """The parameter, or each matrix of a stack of them, which is whole on one rank."""
    if not is_stack(parameter.name):
        return [parameter]
    number, *shape = parameter.shape
    return [
        replace(parameter, name=f"{parameter.name}.{row}", shape=tuple(shape), row_of=(row, number))
        for row in range(number)
    ]


def rows_of_ranks(layout: ShardLayout, parameter: ParameterShape) -> Iterator[tuple[int, int, int]]:
    """(number of ranks, rows of each, width of a row) of one parameter, in the order of ranks.

    Counts one copy of a model that FSDP2 shards, where the first rank has most rows.
    """
    degree = layout.tensor_parallel_degree
    if parameter.row_of is not None:
        row, number = parameter.row_of
        num_shards = layout.world_size if layout.expert_parallel_degree > 1 else layout.shard_group_size
        if row >= chunk_rows(number, num_shards, 0):
            yield 1, 0, 0
        yield 1, *parameter.shape  # type: ignore[misc]
        return
    for tensor_rank in range(1 if parameter.tensor_axis is None else degree):
        num_rows, *others = tensor_local_shape(parameter, degree, tensor_rank)
        size = chunk_rows(num_rows, layout.shard_group_size, 0)
        yield num_rows // max(1, size), size, prod(others)
        yield 1, num_rows % max(1, size), prod(others)
