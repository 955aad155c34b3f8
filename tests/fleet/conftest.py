"""One local Ray for all the tests of a file, as starting it takes longer than most of them; runs of
GRPO to vary.
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fleet.grpo_case import GRPOCase, write_prompts
from tests.fleet.warm_workers import forked_workers
from tests.ranks.fork_server import REPOSITORY
from tests.ranks.shallow import write_shallow_model

__all__ = ["forked_workers"]

NUM_CPU_SLOTS = 16  # slots that actors are placed on, not cores
# Without it Ray would leave one in HOME, for all that look there. A process reads it once.
TOKEN = secrets.token_hex(32)
OBJECT_STORE_BYTES = 128 << 20

# Read when Ray is imported, which test modules may do at their top: nodes have the loopback
# address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this machine alone, connected to; every port binds to loopback.

    It ends with the module: its idle processes use in a minute what a start costs.
    """
    import ray

    from open_instruct.cluster.ray_cluster import make_short_folder
    from open_instruct.cluster.watchdog import Watchdog

    folder = make_short_folder()
    watchdog = Watchdog(folder, logs_folder=None)
    # Ray's workers find the actors of these tests by it.
    with (
        watchdog.marking(),
        patch.dict(os.environ, RAY_AUTH_TOKEN=TOKEN, PYTHONPATH=str(REPOSITORY)),
    ):
        ray.init(
            address="local",
            num_cpus=NUM_CPU_SLOTS,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            configure_logging=False,
        )
    yield
    ray.shutdown()
    watchdog.finish()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> GRPOCase:
    folder = tmp_path_factory.mktemp("grpo")
    model = write_shallow_model(folder / "model", family="olmo2", is_narrow=False)
    return GRPOCase(
        model=model,
        prompts=write_prompts(folder / "prompts.jsonl", 6),
        output_dir=folder / "out",
        flags={"checkpointing_steps": 2},
    )


@pytest.fixture(scope="module")
def variant(base: GRPOCase, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GRPOCase]:
    def make(**flags: Any) -> GRPOCase:
        return replace(
            base, output_dir=tmp_path_factory.mktemp("run") / "out", flags=base.flags | flags
        )

    return make
