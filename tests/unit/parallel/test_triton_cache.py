"""Kernels that Triton compiles lie where nobody else may write, and no folder is left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.parallel import triton_cache
from open_instruct.parallel.triton_cache import CACHE_VARIABLE, OURS_VARIABLE, set_triton_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user with an empty home and an empty TMPDIR, who has Triton."""
    for name in (CACHE_VARIABLE, OURS_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(triton_cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(triton_cache, "find_spec", lambda name: object())
    return folder


def choose(local_rank: int = 0) -> Path:
    set_triton_cache(local_rank)
    return Path(os.environ[CACHE_VARIABLE])


def test_each_rank_has_a_private_folder_that_later_runs_use_again(home: Path) -> None:
    first, second, again = choose(0), choose(1), choose(0)
    assert first == again and first != second
    for folder in (first, second):
        assert folder.is_relative_to(home / ".cache" / "open_instruct")
        assert folder.stat().st_mode & 0o777 == 0o700


def test_folder_that_the_user_has_set_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/somewhere")
    assert choose() == Path("/somewhere")
    assert not any(home.iterdir())


def place_of_others(home: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = home / ".cache" / "open_instruct"
    cache.mkdir(parents=True)
    if how == "open to all":
        (cache / "triton").mkdir()
        (cache / "triton").chmod(0o777)
    elif how == "a link":
        (home / "theirs").mkdir()
        (cache / "triton").symlink_to(home / "theirs")
    elif how == "a file":
        (cache / "triton").touch()
    elif how == "another user's":
        user = os.geteuid()
        monkeypatch.setattr(triton_cache.os, "geteuid", lambda: user + 1)


@pytest.mark.parametrize("how", ["open to all", "a link", "a file", "another user's"])
def test_place_where_others_may_write_is_not_used_and_nothing_is_left(
    home: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_of_others(home, how, monkeypatch)
    folder = choose()
    assert folder.parent == home.parent / "tmp" and folder.stat().st_mode & 0o777 == 0o700
    triton_cache.remove_temporary_folders()
    assert not any((home.parent / "tmp").iterdir())


def test_library_that_is_imported_makes_no_folder(tmp_path: Path) -> None:
    """Of OLMo-core, for which a made-up Triton is there."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    places = {name: str(tmp_path / name) for name in ("HOME", "TMPDIR", "OLMO_TRITON_CACHE_BASE")}
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OLMO_", "TRITON_"))
    }
    environment |= places | {
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])
    }
    subprocess.run(
        [sys.executable, "-c", "import open_instruct, olmo_core"], env=environment, check=True
    )
    assert [
        name
        for name, place in places.items()
        if Path(place).exists() and any(Path(place).iterdir())
    ] == []
    assert not Path(places["OLMO_TRITON_CACHE_BASE"]).exists()
