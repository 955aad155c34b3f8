"""Blocks and heads of public models become kernels of an H100, without one (`kernels.py`, which
lists them).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fake_cuda.compiler import has_triton
from tests.fake_cuda.kernels import CASES, table
from tests.fake_cuda.program import results_of, skip_without_compiler

pytestmark = pytest.mark.extended

NUM_PROCESSES = 2
MOST_VERSIONS = 6
MOST_REGISTERS = 255
MOST_SHARED_BYTES = 227 * 1024
"""Of a block of threads, on an H100."""


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """Of each case, what the compiler made of it.

    Processes of their own, which alone have the hooks.
    """
    skip_without_compiler()
    if not has_triton():
        pytest.skip(
            "needs Triton, whose wheel has the assembler: `make triton` (190 MiB), beside this "
            "environment"
        )
    names = [*CASES]
    with ThreadPoolExecutor() as threads:
        parts = threads.map(
            _compiled, (names[part::NUM_PROCESSES] for part in range(NUM_PROCESSES))
        )
        return {name: of_case for part in parts for name, of_case in part.items()}


def _compiled(names: list[str]) -> dict[str, Any]:
    return results_of("tests.fake_cuda.kernels", "--json", *names)


@pytest.mark.parametrize("name", CASES)
def test_step_becomes_kernels_of_the_gpu(name: str, results: dict[str, Any]) -> None:
    found = results[name]
    assert "error" not in found, found["error"]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for kernel in found["kernels"]:
        by_name.setdefault(kernel["name"], []).append(kernel)
    assert {kernel["target"] for kernel in found["kernels"]} == {"sm_90a"}
    # Norms, RoPE and the products between matrices, forward and backward; and the loss of the head.
    assert len(by_name) >= 10 and any("log_softmax" in kernel for kernel in by_name)
    for variants in by_name.values():
        # Of its variants Inductor takes the fastest, so one that spills is left out where another
        # does not.
        assert min(each["spilled_bytes"] for each in variants) == 0, table({name: found})
        assert all(each["registers"] <= MOST_REGISTERS for each in variants)
        assert all(each["shared_bytes"] <= MOST_SHARED_BYTES for each in variants)


@pytest.mark.parametrize("name", CASES)
def test_few_versions_serve_steps_and_passes(name: str, results: dict[str, Any]) -> None:
    """In the backward pass too, which on a GPU is in another thread, to which PyTorch's settings do
    not go.
    """
    found = results[name]
    assert "error" not in found, found["error"]
    assert (
        0 < found["versions"]["block"] <= MOST_VERSIONS
        and 0 < found["versions"]["head"] <= MOST_VERSIONS
    )
    assert (found["fallbacks"], found["graph_breaks"]) == (0, {})
