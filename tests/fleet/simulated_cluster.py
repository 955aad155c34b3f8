"""A Ray of several nodes on this machine, in a process of its own: Ray ends one that has once
looked for a token, and later comes to a Ray without one.

    python tests/fleet/simulated_cluster.py '[{"num_cpus": 1}, {"num_cpus": 6, "num_gpus": 3}]'

prints its address, and ends it when its input ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from open_instruct.cluster.ray_cluster import make_short_folder
from open_instruct.cluster.watchdog import Watchdog
from tests.ranks.fork_server import REPOSITORY

OBJECT_STORE_BYTES = 100 << 20


@contextmanager
def simulated_cluster(
    nodes: Sequence[Mapping[str, int]], environment: Mapping[str, str]
) -> Iterator[str]:
    """The address of a cluster whose nodes have these options of Ray; the first one is its head."""
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(nodes)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield next(line.strip() for line in process.stdout if line.startswith("127.0.0.1:"))
    finally:
        process.communicate()


def main(nodes: Sequence[Mapping[str, int]]) -> None:
    # Read when Ray is imported: it stays on the loopback interface.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    folder = make_short_folder()
    # Whatever `temp_dir` says, `Cluster` leaves its address in a folder of this name, and does not
    # make it.
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir()
    from ray.cluster_utils import Cluster

    watchdog = Watchdog(folder, logs_folder=None)
    with watchdog.marking():
        cluster = Cluster()
        for node in nodes:
            cluster.add_node(
                object_store_memory=OBJECT_STORE_BYTES,
                temp_dir=str(folder),
                include_dashboard=False,
                **node,
            )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
    watchdog.finish()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
