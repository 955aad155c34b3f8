"""The package as a wheel: everything is in it, and it works outside the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("open_instruct", "configs", "pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__")

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was unpacked into.

    It is built from a copy, as building writes beside its sources.
    """
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, sources / name, symlinks=True, ignore=LEFT_OUT)
        else:
            shutil.copy(REPOSITORY / name, sources)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--target", str(folder), str(sources)], check=True, cwd=sources)
    return folder


def run(installed: Path, *words: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, str(installed / "bin" / "open-instruct"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_wheel_has_every_file_of_the_package(installed: Path) -> None:
    package = REPOSITORY / "open_instruct"
    wanted = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    wanted |= {
        Path("configs", path.relative_to(REPOSITORY / "configs"))
        for path in REPOSITORY.glob("configs/*/*")
    }
    found = {
        path.relative_to(installed / package.name) for path in (installed / package.name).rglob("*")
    }
    assert {path for path in wanted if "__pycache__" not in path.parts} <= found
    assert (installed / package.name / "py.typed").is_file()


def test_new_user_gets_a_model_and_settings_and_a_plan_from_it(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(run(installed, "configs", "dpo/tiny_cpu", folder=tmp_path))
    run(installed, "tiny-model", "model", "--family", "olmo2", folder=tmp_path)
    plan = run(
        installed,
        "plan",
        "dpo",
        "mine.yaml",
        "--model_name_or_path",
        "model",
        "--gpus_per_node",
        "2",
        folder=tmp_path,
    )
    assert "GiB" in plan
    where = [sys.executable, "-c", "import open_instruct; print(open_instruct.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    assert subprocess.check_output(where, cwd=tmp_path, env=environment, text=True).startswith(
        str(installed)
    )
