"""Access to the mesh that OLMo-core keeps for a process; its public functions can only make one, once."""

import torch
from olmo_core.distributed import parallel
from torch.distributed.device_mesh import DeviceMesh

from open_instruct.parallel.data_parallel import parallel_configs
from open_instruct.shard_layout import ShardLayout


def mesh_of(layout: ShardLayout, device: torch.device) -> DeviceMesh | None:
    """The mesh of this process, made if there is none; its axes are replica, shard, context, tensor, outermost first.

    None on a single device.
    """
    if (mesh := parallel.get_world_mesh()) is not None or layout.single_device:
        return mesh
    return parallel.build_world_mesh(**parallel_configs(layout), device_type=device.type)


def keep_mesh(mesh: DeviceMesh | None) -> None:
    """Set the mesh of this process; after None, the next call that needs a mesh makes one."""
    parallel._WORLD_MESH = mesh
