"""A run and its machines, as the input of a plan, and what its backend adds to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from open_instruct.config.flags import list_flags
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import divisors, find_layout
from open_instruct.parallel.resolve import resolve
from open_instruct.planning.exchanges import Exchange
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.subject.build_workload import (
    RunConfig,
    build_workload,
    find_objective,
    with_adapters,
)
from open_instruct.planning.subject.devices import Device
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload
from open_instruct.planning.traffic import merging_traffic, traffic_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagChange:
    """One change of flags.

    Kinds are tried in their order, and changes of one kind from the mildest on.
    """

    kind: int
    strength: int
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run and its machines: the input of a plan.

    Example: DPO of a 7B model on two nodes of 8 H100::

        Setting(
            config=DPOConfig(…),
            shape=model_shape("allenai/OLMo-2-1124-7B"),
            gpus_per_node=(8, 8),
            device=find_device("h100"),
        )
    """

    config: RunConfig
    shape: ModelShape
    gpus_per_node: tuple[int, ...]  # for training; GPUs of engines come on top
    device: Device
    mfu: float = 0.4
    on_cuda: bool = True
    shared_prompt_tokens: int = 0
    has_engines_in_node: bool = False  # one node has learners and engines

    @cached_property
    def layout(self) -> ShardLayout:
        """The layout that the run itself would take.

        Raises:
            InputError: the sharding flags cannot work on these nodes.
        """
        return find_layout(self.config.parallel, self.gpus_per_node, self.config.backend)

    @cached_property
    def backend(self) -> BackendPlanner:
        """What the planner knows of the backend (--backend) that shards the model."""
        planner: BackendPlanner = self.config.backend.make_planner(self.config.parallel)
        return planner

    @cached_property
    def workload(self) -> Workload:
        """The work of one rank in a step."""
        config = self.config
        workload = build_workload(
            config, self.shape, self.layout, prompt_tokens=self.shared_prompt_tokens
        )
        shares_node = self.has_engines_in_node or workload.shares_device
        crosses = not shares_node and workload.sync_backend != "shm"
        copies_checkpoints = config.run.async_checkpoints == "on"
        if config.run.async_checkpoints == "auto":
            copies_checkpoints = self.on_cuda
        workload = replace(
            workload,
            on_cuda=self.on_cuda,
            has_moments_on_host=self.on_cuda and config.parallel.adam_offload,
            has_weights_on_host=self.on_cuda and config.parallel.offload,
            copies_checkpoints=copies_checkpoints,
            sync_crosses_nodes=crosses,
        )
        if not isinstance(config, GRPOConfig):
            return workload
        workload = replace(workload, sync_choice=config.choose_sync(same_host=not crosses))
        if not workload.shares_device:
            return workload
        cache_bytes = workload.cache_bytes(config.fleet, self.shape, self.device.memory_bytes)
        return replace(workload, kv_cache_bytes=cache_bytes)

    def with_flags(self, values: dict[str, Any]) -> Setting:
        """This setting with other values of some flags; `num_nodes` adds nodes like the first.

        Raises:
            InputError: the flags do not go together.
        """
        values = dict(values)
        nodes = self.gpus_per_node
        if "num_nodes" in values:
            nodes = (nodes[0],) * values.pop("num_nodes")
        config: Any = self.config
        if isinstance(config, GRPOConfig):
            values["num_learners_per_node"] = list(nodes)
        flags = list_flags(type(config))
        for name, value in values.items():
            section_name = flags[name].section
            section = replace(getattr(config, section_name), **{name: value})
            config = replace(config, **{section_name: section})
        config = resolve(config, config.backend)
        find_objective(config).validate(config)
        return replace(
            self,
            config=config,
            shape=with_adapters(self.shape, config.adapters),
            gpus_per_node=nodes,
            has_engines_in_node=self.has_engines_in_node and len(nodes) == 1,
        )


class BackendPlanner:
    """What a backend adds to a plan; this is FSDP2's, and other backends override its methods.

    It is not the backend that trains (`training.backend.Backend`), and loads no torch.
    """

    sharing = ""  # how, where that is no layout that can be drawn

    def memory_model(
        self, shape: ModelShape, layout: ShardLayout, workload: Workload
    ) -> MemoryModel:
        """The memory of a model that is trained."""
        return MemoryModel(shape, layout, workload)

    def exchanges(self, model: MemoryModel) -> Iterable[Exchange]:
        """The collectives of one step, and of adding adapters to the weights that are sent."""
        exchanges = traffic_per_step(model.shape, model.layout, model.workload)
        if not model.workload.merges_adapters:
            return exchanges
        return (*exchanges, *merging_traffic(model.shape, model.layout))

    def cells(self, layout: ShardLayout) -> dict[str, object]:
        """The three columns that distinguish a layout in the ranking."""
        return {
            "shard ×": f"{layout.shard_degree} ×",
            "replicas ×": f"{layout.num_replicas} ×",
            "tensor": layout.tensor_parallel_degree,
        }

    def list_layouts(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Flags of every way to share these devices: shard degree, replicas and tensor degree.

        Among them are those that the run would refuse, such as tensor degrees that split heads.
        """
        parallel = setting.config.parallel
        if parallel.single_gpu_mode:
            return
        num_ranks = sum(setting.gpus_per_node) // parallel.context_parallel_degree
        for tensor in divisors(num_ranks):
            for shard in divisors(num_ranks // tensor):
                values = {
                    "fsdp_shard_degree": shard,
                    "fsdp_num_replicas": num_ranks // tensor // shard,
                    "tensor_parallel_degree": tensor,
                }
                if parallel.expert_parallel_degree == 1:
                    yield values
                elif setting.shape.num_experts % shard == 0:
                    yield values | {"expert_parallel_degree": shard}

    def list_memory_changes(self, setting: Setting) -> Iterator[FlagChange]:
        """Changes that need less memory, by kind.

        Larger shard degrees in a node (kind 0) and across (4), tensor degrees (5), moments on hosts
        (6), all on hosts (7).
        """
        yield from self._offloads(setting)
        layout = setting.layout
        tensor_now = layout.tensor_parallel_degree
        num_parts_now = layout.shard_degree * tensor_now
        for values in self.list_layouts(setting):
            shard = values["fsdp_shard_degree"]
            tensor = values["tensor_parallel_degree"]
            if tensor == tensor_now and shard > layout.shard_degree:
                kind = 4 if setting.with_flags(values).layout.straddles_nodes else 0
                yield FlagChange(kind=kind, strength=shard, values=values)
            num_neighbours = tensor * layout.context_parallel_degree
            is_in_node = gcd(*layout.gpus_per_node) % num_neighbours == 0
            if tensor > tensor_now and shard * tensor >= num_parts_now and is_in_node:
                yield FlagChange(kind=5, strength=shard * tensor, values=values)

    def _offloads(self, setting: Setting) -> Iterator[FlagChange]:
        parallel = setting.config.parallel
        optimizer = setting.config.optim.optimizer
        if not setting.on_cuda or parallel.offload:
            return
        if optimizer in ("adamw", "adamw_8bit") and not parallel.adam_offload:
            yield FlagChange(kind=6, strength=0, values={"adam_offload": True})
        if optimizer != "muon" and not parallel.single_gpu_mode:
            yield FlagChange(kind=7, strength=0, values={"offload": True})
