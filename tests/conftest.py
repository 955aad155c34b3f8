"""Tests marked `gpu` are skipped where there is no CUDA device, but for a rehearsal of them on the CPU."""

from __future__ import annotations

import os

import pytest

import open_instruct  # noqa: F401  (before OLMo-core, which it keeps from writing into /tmp)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or os.environ.get("REHEARSE_GPU_TESTS"):
        return
    import torch  # only now: most selections of tests do without it

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
