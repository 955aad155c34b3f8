"""The driver of a small fleet on the Ray at an address, for the test beside it: learners send, an
engine takes.

    python tests/fleet/two_hosts.py HOST:PORT LEARNERS_OF_NODE_0 [LEARNERS_OF_NODE_1 ...]

Prints one line of JSON: at which addresses they met, through which interfaces, and what arrived.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from open_instruct.models.hf.names import TensorNames
from tests.fleet.learners import Recruit

TIMEOUT_S = 600.0
BACKEND = "gloo"


class Sender(Recruit):
    """A learner with weights to send."""

    def __init__(self) -> None:
        super().__init__()
        from open_instruct.weight_sync.sender import WeightSender

        linear = nn.Linear(3, 1, bias=False)
        nn.init.constant_(linear.weight, 7.0)
        model, names = nn.Sequential(linear), cast(TensorNames, [("0.weight", "weight")])
        self.sender = WeightSender(
            model, names, backend=BACKEND, dtype=torch.float32, bucket_bytes=64, timeout_s=TIMEOUT_S
        )

    def open_channel(self) -> dict[str, Any]:
        return self.sender.open(1)

    def send(self) -> tuple[str, str, str]:
        """Returns where this learner met the others, and through which interface gloo and NCCL
        would.
        """
        self.sender.join()
        self.sender.send(1)
        return os.environ["MASTER_ADDR"], *interfaces()


class Receiver:
    """What an engine is to the learners."""

    def receive(
        self, info: Mapping[str, Any], meeting_address: str
    ) -> tuple[list[float], tuple[str, str]]:
        from open_instruct.cluster.actor_host import apply_environment
        from open_instruct.weight_sync.receiver import IncomingWeights

        apply_environment({}, meeting_address=meeting_address)
        incoming = IncomingWeights(info, index=0, device=torch.device("cpu"))
        ((_, weight),) = [pair for bucket in incoming.buckets() for pair in bucket]
        values: list[float] = weight.flatten().tolist()
        incoming.close()
        return values, interfaces()


def interfaces() -> tuple[str, str]:
    """Of gloo and of NCCL, as the environment names them."""
    return os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]


def main(address: str, learners_per_node: tuple[int, ...]) -> None:
    from open_instruct.cluster.learner_group import LearnerGroup
    from open_instruct.cluster.placement import FleetShape
    from open_instruct.cluster.ray_cluster import start_cluster
    from open_instruct.config.fleet_sections import FleetSection

    shape = FleetShape(
        learners_per_node=learners_per_node,
        num_engines=1,
        devices_per_engine=1,
        shares_device=False,
    )
    fleet = FleetSection(ray_address=address, cluster_timeout_s=600)
    with start_cluster(fleet, shape, say=lambda text: None) as placement:
        import ray

        actor: Any = ray.remote(Receiver)
        engine = actor.options(**placement.engine_options(0)).remote()
        learners = LearnerGroup(Sender, placement)
        learners.wait_ready(TIMEOUT_S)
        channel = learners.start(Sender.open_channel).result(TIMEOUT_S)[0]
        sending = learners.start(Sender.send)
        meeting_address = placement.whereabouts().meeting_address()
        arrived, of_engine = ray.get(
            engine.receive.remote(channel, meeting_address), timeout=TIMEOUT_S
        )
        met = sending.result(TIMEOUT_S)
    print(
        json.dumps(
            {"met": met, "channel": channel["address"], "arrived": arrived, "of_engine": of_engine}
        )
    )


if __name__ == "__main__":
    # So that Ray finds the classes by name.
    from tests.fleet.two_hosts import main as main_of_module

    main_of_module(sys.argv[1], tuple(map(int, sys.argv[2:])))
