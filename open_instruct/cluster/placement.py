"""Places for learners and engines: Ray's placement groups, and messages about what is missing.

One bundle holds all learners of a node, so they are on one node. Bundles go to different nodes in
the order of `--num_learners_per_node`, so ranks are counted node by node, and the sharding layout
gets the real node sizes. Each engine has a bundle of its own, wherever there is room. Engines that
take turns with learners, the first ones, are in the learners' bundles: these reserve the GPUs, and
engine k sees those of the ranks from k times its size on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from open_instruct.cluster.addresses import Host, Whereabouts
from open_instruct.config.fleet_sections import FleetSection, LearnerParallelSection
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.text import spell_count
from open_instruct.parallel.engines import count_engines
from open_instruct.parallel.wording import nodes_text

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Say = Callable[[str], None]
SECONDS_BETWEEN_REPORTS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The learners and engines that a run needs places for.

    Example: `--num_learners_per_node 2 4 --vllm_num_engines 2` is `FleetShape(learners_per_node=(2,
    4), num_engines=2, devices_per_engine=1, shares_device=False)`.
    """

    learners_per_node: tuple[int, ...]
    num_engines: int
    devices_per_engine: int
    shares_device: bool
    """The one learner and the one engine share one device."""

    takes_turns: bool = False
    """The first engines are on the learners' devices, which have one or the other at a time."""

    @classmethod
    def of(cls, fleet: FleetSection, parallel: LearnerParallelSection) -> FleetShape:
        return cls(
            learners_per_node=tuple(parallel.num_learners_per_node),
            num_engines=count_engines(fleet, sum(parallel.num_learners_per_node)),
            devices_per_engine=fleet.vllm_tensor_parallel_size,
            shares_device=parallel.single_gpu_mode,
            takes_turns=fleet.takes_turns,
        )

    @property
    def num_learners(self) -> int:
        return sum(self.learners_per_node)

    @property
    def num_turning_engines(self) -> int:
        """Engines that take turns with the learners."""
        return self.num_learners // self.devices_per_engine if self.takes_turns else 0

    @property
    def num_free_engines(self) -> int:
        """Engines on devices that no learner has."""
        return 0 if self.shares_device else self.num_engines - self.num_turning_engines

    @property
    def works_at_once(self) -> bool:
        """Whether an engine may compute while learners do, where steps are asynchronous."""
        return not self.takes_turns or self.num_free_engines > 0

    @property
    def num_devices(self) -> int:
        """The number of GPUs, or of CPU slots on a cluster without GPUs."""
        return self.num_learners + self.num_free_engines * self.devices_per_engine

    @property
    def num_cpu_slots(self) -> int:
        """The number of CPU slots that is enough with GPUs and without."""
        return self.num_learners + self.num_engines * self.devices_per_engine

    def text(self, device: str) -> str:
        """In words: "nodes of 2 and 4 GPUs for learners, and 1 engine of 1 GPU"."""
        if self.shares_device:
            return f"1 {device} for learner and engine together"
        places = f"{nodes_text(self.learners_per_node, device)} for learners"
        if self.takes_turns:
            places += " and engines in turns"
        if not self.num_free_engines:
            return places
        engines = spell_count(self.num_free_engines, "engine")
        return f"{places}, and {engines} of {spell_count(self.devices_per_engine, device)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The reserved places of a run."""

    shape: FleetShape
    on_gpus: bool
    learner_bundles: PlacementGroup
    engine_bundles: PlacementGroup

    def whereabouts(self) -> Whereabouts:
        """The hosts of this process and of all places."""
        import ray
        from ray.util.placement_group import placement_group_table

        hosts = {
            node["NodeID"]: Host(node["NodeManagerAddress"], node["NodeManagerHostname"])
            for node in ray.nodes()
        }

        def find_hosts(bundles: PlacementGroup) -> frozenset[Host]:
            nodes = placement_group_table(bundles)["bundles_to_node_id"].values()
            return frozenset(hosts[node] for node in nodes)

        learners = find_hosts(self.learner_bundles)
        engines = find_hosts(self.engine_bundles)
        return Whereabouts(
            driver=hosts[ray.get_runtime_context().get_node_id()],
            learners=learners,
            engines=engines | learners if self.shape.takes_turns else engines,
        )

    def learner_options(self, rank: int) -> dict[str, Any]:
        """The arguments of `.options(**…)` for the actor of a learner."""
        node, _ = self.node_and_local_rank(rank)
        return self._options(self.learner_bundles, node, num_devices=1)

    def engine_options(self, index: int) -> dict[str, Any]:
        """The arguments of `.options(**…)` for the actor of an engine, also after a restart."""
        num_devices = 1 if self.shape.shares_device else self.shape.devices_per_engine
        bundles, place = self._find_engine_place(index)
        options = self._options(bundles, place, num_devices=num_devices)
        if self.takes_turns(index) and not self.shape.shares_device:
            return options | {"num_gpus": 0}  # the learners have them
        return options

    def beside_engine_options(self, index: int) -> dict[str, Any]:
        """The arguments of `.options(**…)` for an actor on an engine's node that needs no slot."""
        return self.engine_options(index) | {"num_cpus": 0, "num_gpus": 0}

    def find_engine_nodes(self) -> dict[str, int]:
        """The ids of the nodes that have engines, each with the first of its engines."""
        from ray.util.placement_group import placement_group_table

        engines: dict[str, int] = {}
        for index in range(self.shape.num_engines):
            bundles, place = self._find_engine_place(index)
            nodes = placement_group_table(bundles)["bundles_to_node_id"]
            engines.setdefault(nodes[place], index)
        return engines

    def find_driver_node(self) -> str:
        """The id of the node on which this process is."""
        import ray

        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def _find_engine_place(self, index: int) -> tuple[PlacementGroup, int]:
        """The bundles among which an engine's is, and its index there."""
        if self.shape.shares_device:
            return self.engine_bundles, 0
        if not self.takes_turns(index):
            return self.engine_bundles, index - self.shape.num_turning_engines
        node, _ = self.node_and_local_rank(self.first_rank(index))
        return self.learner_bundles, node

    def takes_turns(self, index: int) -> bool:
        """Whether an engine is on the devices of learners."""
        return index < self.shape.num_turning_engines

    def first_rank(self, index: int) -> int:
        """The first of the learners whose devices an engine has in its turn."""
        return index * self.shape.devices_per_engine

    def node_and_local_rank(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its index there.

        Example: it is `(1, 0)` for rank 2 of nodes with 2 and 4 learners.
        """
        local_rank = rank
        for node, num_learners in enumerate(self.shape.learners_per_node):
            if local_rank < num_learners:
                return node, local_rank
            local_rank -= num_learners
        raise IndexError(f"there is no learner {rank}")

    def wait(self, *, timeout_s: float, say: Say) -> None:
        """Return once every place is reserved, also after a node was lost.

        Raises:
            RunError: it took longer than `timeout_s`; the message says what the run needs and what
                the cluster has.
        """
        began_s = time.monotonic()
        for bundles in (self.learner_bundles, self.engine_bundles):
            while True:
                left_s = began_s + timeout_s - time.monotonic()
                if bundles.wait(max(0.0, min(SECONDS_BETWEEN_REPORTS, left_s))):
                    break
                waited_s = time.monotonic() - began_s
                if waited_s >= timeout_s:
                    raise RunError(
                        f"{self._missing_text()} after {waited_s:.0f} s. Add nodes, ask for less, "
                        "free what other runs hold, or raise --cluster_timeout_s"
                    )
                say(
                    f"waiting for the cluster ({waited_s:.0f} of {timeout_s:.0f} s): "
                    f"{self._missing_text()}"
                )

    def _options(self, bundles: PlacementGroup, index: int, *, num_devices: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        num_gpus = 0.5 if self.shape.shares_device else num_devices
        return {
            "num_cpus": 1 if self.on_gpus else num_devices,
            "num_gpus": num_gpus if self.on_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                bundles, placement_group_bundle_index=index
            ),
            # An actor that Ray starts again would be alone: its peers, or its weights, are gone.
            "max_restarts": 0,
        }

    def _missing_text(self) -> str:
        device = _device(self.on_gpus)
        return f"asked: {self.shape.text(device)}; the cluster has {_cluster_text(device)}"


@contextmanager
def place(
    shape: FleetShape,
    *,
    timeout_s: float,
    say: Say,
    is_one_machine: bool,
) -> Iterator[Placement]:
    """Reserve places in the Ray cluster of this process; actors in them end with the block.

    Args:
        shape: the places, on GPUs if the cluster has any, else on CPU slots.
        timeout_s: how long nodes may take to appear.
        say: called with the progress.
        is_one_machine: no node will join. Too large a shape is refused at once, and without GPUs
            this machine may stand for several nodes.

    Raises:
        InputError: this one machine has too little.
        RunError: the cluster had too little until `timeout_s` passed; the message says what the run
            needs and what the cluster has.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    shares_nodes = is_one_machine and not on_gpus and len(shape.learners_per_node) > 1
    if is_one_machine:
        _refuse_what_cannot_fit(shape, on_gpus)
    if shares_nodes:
        say(f"this machine stands for {len(shape.learners_per_node)} nodes of learners")
    learner_bundles, engine_bundles = _reserve(shape, on_gpus=on_gpus, shares_nodes=shares_nodes)
    placement = Placement(
        shape=shape,
        on_gpus=on_gpus,
        learner_bundles=learner_bundles,
        engine_bundles=engine_bundles,
    )
    try:
        placement.wait(timeout_s=timeout_s, say=say)
        yield placement
    finally:
        if ray.is_initialized():
            remove_placement_group(learner_bundles)
            if engine_bundles is not learner_bundles:
                remove_placement_group(engine_bundles)


def _reserve(
    shape: FleetShape, *, on_gpus: bool, shares_nodes: bool
) -> tuple[PlacementGroup, PlacementGroup]:
    """Ask for the bundles of learners and of engines, which are one where devices are shared."""
    from ray.util.placement_group import placement_group

    def bundle(num_devices: int, num_cpus: int) -> dict[str, float]:
        return {"GPU": num_devices, "CPU": num_cpus} if on_gpus else {"CPU": num_cpus}

    if shape.shares_device:
        both = placement_group([bundle(1, 2)], strategy="PACK")
        return both, both
    # Beside a GPU that takes turns a learner has a CPU slot, and so may the engine.
    cpus_each = 2 if shape.takes_turns else 1
    learner_bundles = placement_group(
        [bundle(number, cpus_each * number) for number in shape.learners_per_node],
        strategy="PACK" if shares_nodes else "STRICT_SPREAD",
    )
    if not shape.num_free_engines:
        return learner_bundles, learner_bundles
    num_devices = shape.devices_per_engine
    engine_bundle = bundle(num_devices, 1 if on_gpus else num_devices)
    engine_bundles = placement_group([engine_bundle] * shape.num_free_engines, strategy="PACK")
    return learner_bundles, engine_bundles


def _refuse_what_cannot_fit(shape: FleetShape, on_gpus: bool) -> None:
    import ray

    device = _device(on_gpus)
    num_devices = int(ray.cluster_resources().get(device.split()[0], 0))
    if shape.num_devices > num_devices or (on_gpus and len(shape.learners_per_node) > 1):
        single = ", use --single_gpu_mode" if num_devices == 1 else ""
        raise InputError(
            f"asked: {shape.text(device)}; this machine is one node, with "
            f"{spell_count(num_devices, device)}. Ask for less{single}, or join a cluster with "
            "--ray_address",
            kind="machine",
        )


def _device(on_gpus: bool) -> str:
    return "GPU" if on_gpus else "CPU slot"


def _cluster_text(device: str) -> str:
    """The devices of the cluster in words: "nodes of 2 and 4 GPUs, of which 3 are free"."""
    import ray

    resource = device.split()[0]
    nodes = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    nodes = sorted(num_devices for num_devices in nodes if num_devices)
    if not nodes:
        return f"no {device}"
    num_free = int(ray.available_resources().get(resource, 0))
    verb = "is" if num_free == 1 else "are"
    return f"{nodes_text(nodes, device)}, of which {num_free} {verb} free"
