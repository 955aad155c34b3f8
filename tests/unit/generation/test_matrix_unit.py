"""A process may use a processor's matrix unit once it has asked Linux for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[3]

# By arch_prctl(ARCH_GET_XCOMP_PERM), whose bit 18 is the data of AMX's tiles.
ASKING = """
import ctypes
from open_instruct.generation.matrix_unit import allow_matrix_unit

def is_allowed():
    features = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(features)) == 0
    return bool(features.value >> 18 & 1)

before = is_allowed()
allow_matrix_unit(None)
print(before, is_allowed())
"""


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this processor has no matrix unit (AMX)"
)
def test_process_may_use_the_matrix_unit_once_it_has_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKING],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False True\n"
