"""DeepSpeed itself, where one is installed that will do. The other files of this folder take it from here."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from typing import Any

import torch

from open_instruct.learner.deepspeed.versions import installed_version, refuse_unfit


def _loaded() -> Any:
    refuse_unfit(installed_version())
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which it would find out, and warn of
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        library = importlib.import_module("deepspeed")
    library.utils.logger.setLevel("WARNING")
    # Else it compiles for minutes what only its collectives within one host would be quicker with.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # On a CPU it has a program run for the answer, and under stage 3 asks at every bucket of gradients.
    library.utils.numa.get_numa_cores = cache(library.utils.numa.get_numa_cores)
    return library


deepspeed = _loaded()
