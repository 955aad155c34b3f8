"""Tests marked `gpu` are skipped where there is no CUDA device."""

from __future__ import annotations

import pytest

import open_instruct  # noqa: F401  (before OLMo-core, which it keeps from writing into /tmp)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # only now: most selections of tests do without it

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
