"""What libraries say of a machine while they are imported stays out of a run's output."""

import os
import subprocess
import sys

import pytest

# It looks for CUDA as PyTorch does while it is imported, if it was built for CUDA.
LOOK_FOR_CUDA = "from torch.utils import cpp_extension; assert cpp_extension._find_cuda_home()"


def stderr_of(program: str) -> str:
    environment = {**os.environ, "CUDA_HOME": "/somewhere", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.extended
def test_pytorch_says_nothing_of_a_compiler_without_a_gpu() -> None:
    assert "CUDA_HOME" in stderr_of(LOOK_FOR_CUDA)  # left alone it does
    assert "CUDA_HOME" not in stderr_of(f"import open_instruct; {LOOK_FOR_CUDA}")
