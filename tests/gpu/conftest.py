"""The device that is compared with the CPU."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU; the CPU in a rehearsal, which shows that the tests themselves run."""
    return torch.device("cpu") if os.environ.get("REHEARSE_GPU_TESTS") else torch.device("cuda", 0)
