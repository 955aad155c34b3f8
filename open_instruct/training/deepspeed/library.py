"""DeepSpeed itself, if a fit version is installed.

The other files of this folder import it from here.
"""

import importlib
import os
import warnings
from functools import cache
from typing import Any

import torch

from open_instruct.training.deepspeed.settings import refuse_unfit


def _load() -> Any:
    refuse_unfit()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which it would find out with a warning
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        library = importlib.import_module("deepspeed")
    library.utils.logger.setLevel("WARNING")
    # Otherwise DeepSpeed compiles for minutes a library that only makes collectives within one host
    # faster.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # On a CPU DeepSpeed starts a program for this answer, and stage 3 asks at every bucket of
    # gradients.
    library.utils.numa.get_numa_cores = cache(library.utils.numa.get_numa_cores)
    return library


deepspeed = _load()
