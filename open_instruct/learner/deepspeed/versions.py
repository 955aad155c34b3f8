"""The installed version of DeepSpeed is checked without importing torch or DeepSpeed."""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from open_instruct.errors import InputError

WANTED = SpecifierSet(">=0.19.8,<0.20")


def refuse_unfit() -> None:
    """:raises InputError: DeepSpeed is missing, or its version is none that the tests were run with."""
    remedy = "make install puts it in, and so does pip install 'open-instruct[deepspeed]'"
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"--backend deepspeed: the package deepspeed is not installed; {remedy}") from None
    if Version(version) not in WANTED:
        raise InputError(f"--backend deepspeed: deepspeed {version} is installed, and {WANTED} is needed; {remedy}")
