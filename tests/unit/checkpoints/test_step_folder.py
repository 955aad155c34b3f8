"""Folders of checkpoints: whole ones, damaged ones, half ones, and those of another format."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from open_instruct.checkpoints import step_folder
from open_instruct.checkpoints.step_folder import DAMAGED, MANIFEST, Damaged, Manifest
from open_instruct.models.box_files import write_hashed
from tests.refusals import refused

FILES = {
    "index.json": b"{}",
    "rank0.json": b"[]",
    "rank0.safetensors": b"weights",
    "rank1.json": b"[1]",
}


def save(folder: Path, step: int, *, contents: dict[str, bytes] = FILES) -> Path:
    final = folder / f"step{step}"
    part = step_folder.begin(final)
    files = {name: write_hashed(part / name, [content]) for name, content in contents.items()}
    step_folder.write_manifest(
        part, Manifest(step=step, num_ranks=2, start_model="ab", files=files)
    )
    step_folder.publish(part, final)
    return final


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    manifest = step_folder.read_manifest(folder)
    assert (manifest.step, manifest.num_ranks, manifest.start_model) == (4, 2, "ab")
    assert step_folder.find_damage(folder) == [] and manifest.files.keys() == FILES.keys()
    assert names(tmp_path) == ["step4"] and step_folder.latest_step(tmp_path) == 4


def test_newest_is_the_one_of_the_highest_number(tmp_path: Path) -> None:
    for step in (10, 2, 9):
        save(tmp_path, step)
    (tmp_path / "step99").mkdir()  # the user's own
    (tmp_path / "step_by_step").mkdir()
    assert [path.name for path in step_folder.find_candidates(tmp_path)] == [
        "step10",
        "step9",
        "step2",
    ]
    assert [path.name for path in step_folder.find_checkpoints(tmp_path)] == [
        "step2",
        "step9",
        "step10",
    ]
    assert (
        step_folder.latest_step(tmp_path / "gone") is None
        and step_folder.find_checkpoints(tmp_path / "gone") == []
    )


def test_copy_under_another_name_is_damaged(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 4), tmp_path / "step9")
    with pytest.raises(Damaged, match="step9 is a copy of another checkpoint, that of step 4"):
        step_folder.read_manifest(tmp_path / "step9")
    (tmp_path / "step9").rename(tmp_path / "best")  # no name of a step says nothing of it
    assert step_folder.read_manifest(tmp_path / "best").step == 4
    (tmp_path / "best").rename(tmp_path / "step7-tmp")
    step_folder.tidy(tmp_path)
    assert names(tmp_path) == ["step4"]


@pytest.mark.parametrize("name", FILES)
def test_any_byte_of_any_file_counts(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 4)
    for at in range(len(FILES[name])):
        flip(folder / name, at)
        (told,) = step_folder.find_damage(folder)
        assert told == f"{folder / name} is not what was written"
        flip(folder / name, at)
    (folder / name).unlink()
    assert step_folder.find_damage(folder) == [f"{folder / name} is missing"]


def test_any_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    for at in range((folder / MANIFEST).stat().st_size - 1):  # but the line break at its end
        flip(folder / MANIFEST, at)
        with pytest.raises(Damaged, match=r"checkpoint\.json is not what was written"):
            step_folder.read_manifest(folder)
        flip(folder / MANIFEST, at)
    (folder / MANIFEST).unlink()
    with pytest.raises(Damaged, match=r"checkpoint\.json is missing"):
        step_folder.read_manifest(folder)
    assert [path.name for path in step_folder.find_candidates(tmp_path)] == [
        "step4"
    ] and step_folder.find_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"[" * 100_000, b"\xff", b'{"checkpoint": 1, "xxh3": 2}'],
)
def test_manifest_that_is_none(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, 4)
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(Damaged, match="is not what was written"):
        step_folder.read_manifest(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b"])
def test_manifest_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 4)
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["checkpoint"]
    content["files"][name] = {"num_bytes": 1, "xxh3": "0"}
    told = {"checkpoint": content, "xxh3": step_folder.hash_content(content)}
    (folder / MANIFEST).write_text(json.dumps(told))
    with pytest.raises(Damaged):
        step_folder.read_manifest(folder)


def test_step_folder_opens_files_only(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (folder / "rank0.json").unlink()
    os.mkfifo(folder / "rank0.json")  # whoever opens it waits for a writer
    assert step_folder.find_damage(folder) == [f"{folder / 'rank0.json'} is missing"]


class Killed(BaseException):
    pass


CALLS = [(os, "fsync"), (Path, "replace"), (Path, "mkdir"), (step_folder.shutil, "rmtree")]


@pytest.mark.parametrize("step", [6, 4])  # a new one; one that takes the place of the newest
def test_kill_at_any_moment_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The process ends before the n-th call that changes the disk, for every n until the save gets
    through.
    """
    for n in range(100):
        folder = tmp_path / str(n)
        save(folder, 2)
        save(folder, 4)
        left = n

        with monkeypatch.context() as patch:

            def counted(original: Any) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return original(*args, **kwargs)

                return call

            for owner, name in CALLS:
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                save(folder, step, contents=FILES | {"rank0.json": b"new"})
                break
            except Killed:
                pass
        step_folder.tidy(folder)
        assert all(name in ("step2", "step4", "step6") for name in names(folder))
        assert step_folder.latest_step(folder) in (4, step)
        for path in step_folder.find_candidates(folder):
            assert step_folder.find_damage(path) == []
    assert n > 5 and names(folder) == sorted({"step2", "step4", f"step{step}"})
    assert (folder / f"step{step}" / "rank0.json").read_bytes() == b"new"


def test_half_removed_ones_are_removed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr(step_folder.shutil, "rmtree", lambda *_, **__: None)
        step_folder.remove(folder)
    assert step_folder.find_candidates(tmp_path) == [] and names(tmp_path) == ["step4-removed"]
    step_folder.tidy(tmp_path)
    assert names(tmp_path) == []


def test_damaged_ones_lose_their_name_and_nothing_else(tmp_path: Path) -> None:
    for _ in range(2):
        kept = step_folder.set_aside(save(tmp_path, 4), DAMAGED)
        step_folder.tidy(tmp_path)
        assert (
            step_folder.find_candidates(tmp_path) == []
            and kept.name == "step4-damaged"
            and (kept / "rank0.safetensors").exists()
        )


def test_step_folder_of_another_format_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "step4" / "train").mkdir(parents=True)  # OLMo-core's own
    (tmp_path / "step6").mkdir()
    assert [path.name for path in step_folder.find_candidates(tmp_path)] == ["step4"]
    with pytest.raises(Damaged, match=r"step4/checkpoint\.json is missing"):
        step_folder.read_manifest(tmp_path / "step4")
    with refused("bad_checkpoint", "model_name_or_path", "step4"):
        step_folder.refuse_another_format(tmp_path)
    # Beside one that can be read it is only damage.
    save(tmp_path, 2)
    step_folder.refuse_another_format(tmp_path)


def test_checkpoint_removed_meanwhile_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1" / "file").touch()
    stops = threading.Event()

    def come_and_go() -> None:
        while not stops.is_set():
            (tmp_path / "step2").mkdir()
            (tmp_path / "step2").rmdir()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(come_and_go)
        try:
            found = [step_folder.find_candidates(tmp_path) for _ in range(3_000)]
        finally:
            stops.set()
        other.result()
    assert all(each == [tmp_path / "step1"] for each in found)
