"""Which versions are there, whether they go together by pyproject.toml, and whether the device
computes at all.
"""

import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from harness import REPOSITORY
from packaging.requirements import Requirement
from packaging.version import Version

from gpu_check.devices import GIB, device_of, peak_flops
from gpu_check.findings import Findings

# What a step or a file depends on; of other packages a version out of bounds is only told.
MUST_FIT = {"torch", "ai2-olmo-core", "transformers", "tokenizers", "safetensors", "numpy"}
# By the major version of CUDA that torch was built with: CUDA Toolkit release notes, minor version
# compatibility.
LEAST_DRIVER = {12: "525.60.13", 13: "580"}


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    del work
    device = device_of(rehearse)
    facts: dict[str, object] = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "varlen attention takes windows": varlen_takes_windows(),
        "flash-attn": version_of("flash-attn"),
        "triton": version_of("triton"),
        "host memory, GiB": host_memory_gib(),
    }
    if device.type == "cuda":
        properties, driver = torch.cuda.get_device_properties(device), driver_version()
        peak = peak_flops()
        facts |= {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "device memory, GiB": properties.total_memory / GIB,
            "multiprocessors": properties.multi_processor_count,
            "peak, TFLOP/s (bfloat16, dense; data sheet)": None if peak is None else peak / 1e12,
            "driver": driver,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "cuDNN": torch.backends.cudnn.version(),
        }
        problem = driver_problem(driver, torch.version.cuda)
        findings.require(problem is None, str(problem))
    findings.table("This machine", [{"what": name, "is": value} for name, value in facts.items()])

    rows = list(packages())
    findings.table("Packages, by pyproject.toml", rows)
    for row in rows:
        if row["fits"] is False:
            said = (
                f"{row['package']} {row['installed'] or 'is missing'}: pyproject.toml wants "
                f"{row['wanted']}"
            )
            if row["package"] in MUST_FIT:
                findings.require(False, said)
            else:
                findings.note(said)

    left, right = torch.randn(256, 192), torch.randn(192, 128)
    products = (left.to(device) @ right.to(device)).cpu()
    findings.require(
        torch.allclose(products, left @ right, atol=1e-3),
        "a float32 product differs from the CPU's",
    )
    where = facts.get("device", "the CPU")
    findings.headline = (
        f"torch {torch.__version__} on {where}, {sum(row['fits'] is True for row in rows)} "
        "packages fit"
    )


def packages() -> Iterator[dict[str, object]]:
    """What pyproject.toml needs, and whether what is installed fits."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in map(Requirement, project["dependencies"]):
        installed = version_of(requirement.name)
        fits = installed is not None and requirement.specifier.contains(
            installed.split("+")[0], prereleases=True
        )
        wanted = str(requirement.specifier)
        yield {"package": requirement.name, "installed": installed, "wanted": wanted, "fits": fits}


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def varlen_takes_windows() -> bool:
    """Without windows `models/attention/attention.py` does not use it."""
    import inspect

    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def host_memory_gib() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return int(lines[0].split()[1]) * 1024 / GIB


def driver_version() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split()
    return told[0] if told else None


def driver_problem(driver: str | None, cuda: str | None) -> str | None:
    """What is wrong with running a torch built with `cuda` on `driver`;

    None where nothing is, or is known.
    """
    least = None if cuda is None else LEAST_DRIVER.get(int(cuda.split(".")[0]))
    if driver is None or least is None or Version(driver) >= Version(least):
        return None
    return (
        f"the driver is {driver}, and CUDA {cuda} wants {least} or newer: update it, or install a "
        "torch of older CUDA"
    )
