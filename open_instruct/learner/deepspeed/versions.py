"""The installed version of DeepSpeed is checked without importing torch or DeepSpeed."""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from open_instruct.errors import InputError

WANTED = SpecifierSet(">=0.19.8,<0.20")
LACKING = {
    SpecifierSet("<0.16.4"): "it cannot split matrices (--tensor_parallel_degree)",
    SpecifierSet("<=0.17.5"): "below stage 3 its states cannot leave the device between phases",
    SpecifierSet("<0.18.9"): "its Muon forgets the learning rates",
}
"""Shortcomings of DeepSpeed's older versions that are still in use."""


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_unfit(version: str | None) -> None:
    """:raises InputError: DeepSpeed is missing, or its version is none that the tests were run with."""
    remedy = "make install puts it in, and so does pip install 'open-instruct[deepspeed]'"
    if version is None:
        raise InputError(f"--backend deepspeed: the package deepspeed is not installed; {remedy}")
    if Version(version) not in WANTED:
        # Compared as versions, since the string 0.9.5 would be newer than 0.16.4.
        lacks = "".join(f"; {lack}" for old, lack in LACKING.items() if old.contains(version, prereleases=True))
        raise InputError(
            f"--backend deepspeed: deepspeed {version} is installed, and {WANTED} is needed{lacks}; {remedy}"
        )
