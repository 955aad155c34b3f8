"""Streams and threads that share memory wait for each other; where one is made not to, that is
seen.
"""

from typing import Any

import pytest

from tests.fake_cuda.program import results_of, skip_without_compiler

pytestmark = pytest.mark.extended

IN_ORDER = {
    "batches ahead": 1000,
    "inputs on the host": 1000,
    "sharded steps": 3000,
    "weights on the host": 3000,
    "4 bits on the host": 3000,
    "turns": 1000,
    "saves": 50,
    "saves of a run": 1000,
    "weights by nccl": 100,
    "weights by ipc": 100,
    "a tensor that is recorded": 2,
    "a copy that is waited for": 3,
}
"""With the accesses that there are at least."""
SIDE = "on a stream made at inputs_on_host.py"
OTHER = "on a stream made at orders.py"
OF_FSDP = "on a stream made at forward.py"
PLANTED = {
    "inputs on the host, read before they are back": f"written {SIDE}:* and read on the default stream at",
    "inputs on the host, let go before they are out": f"read {SIDE}:* and freed for the default stream before",
    "sharded steps, read before they are gathered": f"written {OF_FSDP}:* and read on the default stream at",
    "sharded steps, reduced before they are computed": f"written on the default stream at * and read {OF_FSDP}",
    "weights on the host, stepped before gradients are there": f"written {OF_FSDP}:* and read on MainThread at",
    "turns, moved before they are computed": f"written {OTHER}:* and read on the default stream at state_mover",
    "turns, computed with before they are back": f"written on the default stream at state_mover.py:* and read {OTHER}",
    "saves of a run, changed before they are copied": "read on a stream made at background.py:* and written on the",
    "saves, read before they are copied": "written on a stream made at background.py:* and read on checkpoint_0 at",
    "saves, copied before they are computed": "written on the default stream at * and read on a stream made at",
    "weights by nccl, sent before they are packed": "written on the default stream of nccl_0 at * and read on NCCL's",
    "weights by ipc, told before they are written": "written on the default stream of ipc_0 at * and read on the",
    "a copy that is read too early": "written on the default stream at * and read on MainThread at",
    "a tensor that is not recorded": "read on a stream made at orders.py:* and freed for the default stream before",
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Of each case, what tests/fake_cuda/orders.py found.

    One process for all: it alone has the hooks.
    """
    skip_without_compiler()
    return results_of("tests.fake_cuda.orders")


def races(results: dict[str, Any], name: str) -> list[str]:
    assert "error" not in results[name], results[name]["error"]
    found: list[str] = results[name]["races"]
    return found


@pytest.mark.parametrize("name", IN_ORDER)
def test_shared_tensor_is_waited_for(name: str, results: dict[str, Any]) -> None:
    assert races(results, name) == []
    assert results[name]["num_accesses"] >= IN_ORDER[name]


@pytest.mark.parametrize("name", PLANTED)
def test_wait_that_is_missing_is_found(name: str, results: dict[str, Any]) -> None:
    first, then = PLANTED[name].split("*")
    assert any(first in race and then in race for race in races(results, name)), races(
        results, name
    )[:3]
