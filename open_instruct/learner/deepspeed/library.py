"""DeepSpeed itself, where one is installed that will do. The other files of this folder take it from here."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import warnings
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from open_instruct.errors import InputError

WANTED = SpecifierSet(">=0.19.8,<0.20")


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_unfit(version: str | None) -> None:
    """:raises InputError: there is none, or another than those that the tests were run with."""
    remedy = "make install puts it in, and so does pip install 'open-instruct[deepspeed]'"
    if version is None:
        raise InputError(f"--backend deepspeed: the package deepspeed is not installed; {remedy}")
    if Version(version) not in WANTED:
        raise InputError(f"--backend deepspeed: deepspeed {version} is installed, and {WANTED} is needed; {remedy}")


def _loaded() -> Any:
    refuse_unfit(installed_version())
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which it would find out, and warn of
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        library = importlib.import_module("deepspeed")
    library.utils.logger.setLevel(logging.WARNING)
    # Else it compiles for minutes what only its collectives within one host would be quicker with.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


deepspeed = _loaded()
