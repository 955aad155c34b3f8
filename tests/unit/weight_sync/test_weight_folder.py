"""Weights through a folder: chains of any length are the weights to the bit, and what is torn is
never taken.
"""

import errno
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.core.errors import InputError, RunError
from open_instruct.weight_sync import folder_sender
from open_instruct.weight_sync.changes import SentParts, view_bits
from open_instruct.weight_sync.channel import FindLocal
from open_instruct.weight_sync.folder import (
    FolderWeights,
    choose_sync_folder,
    find_links,
    make_folder,
)
from open_instruct.weight_sync.folder_sender import FolderSender
from open_instruct.weight_sync.manifest import WeightManifest
from tests.unit.weight_sync.test_weight_changes import versions

SHAPES = {"a": (20, 3), "b": (), "c": (7, 5)}
Weights = Mapping[str, torch.Tensor]


class Sender(FolderSender):
    """One rank that holds all of some tensors in the place of a model's."""

    def __init__(
        self, weights: Weights, folder: Path, *, anchor_every: int = 16, changes_alone: bool = True
    ) -> None:
        self.weights = weights
        self.manifest = WeightManifest(
            {name: tuple(each.shape) for name, each in weights.items()},
            {
                name: {0: tuple(slice(0, size) for size in each.shape)}
                for name, each in weights.items()
            },
            dtype=weights["a" if "a" in weights else "rows"].dtype,
            bucket_bytes=100,
        )
        self._rank = 0
        self._backend = "files"
        self._changes_alone = changes_alone
        self._check_every = 1
        self._folder = folder
        self._anchor_every = anchor_every

    def _make_finder(self) -> FindLocal:
        return self.weights.__getitem__


def opened(sender: Sender) -> FolderWeights:
    return FolderWeights(sender.open(1), index=0)


def assert_holds(receiver: FolderWeights, weights: Weights) -> None:
    held = dict(next(receiver.buckets()))
    assert held.keys() == weights.keys()
    for name, each in weights.items():
        assert torch.equal(view_bits(held[name]), view_bits(each)), name


@given(
    versions(num_versions=6),
    st.integers(1, 7),
    st.booleans(),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_chains_are_the_weights(
    drawn: tuple[torch.dtype, list[dict[str, torch.Tensor]]],
    anchor_every: int,
    is_delta: bool,
    reads: list[bool],
) -> None:
    """For who follows, who misses versions, and who is new; and the folder has at most a chain of
    two wholes.
    """
    _, found = drawn
    with tempfile.TemporaryDirectory() as name:
        sender = Sender(found[0], Path(name), anchor_every=anchor_every, changes_alone=is_delta)
        info = sender.open(2)
        receivers = [FolderWeights(info, index=0), FolderWeights(info, index=1)]
        for version, (weights, is_read) in enumerate(zip(found, reads, strict=True)):
            sender.weights = weights
            sender.send(version)
            late = FolderWeights(info, index=2)
            for receiver in (receivers[0], late, *receivers[1:] * is_read):
                receiver.stage(version)
                assert_holds(receiver, weights)
            chain = find_links(version, info["chain"], known_version=None)
            assert len(chain) <= (anchor_every if is_delta else 1)
            assert len(list(Path(name).iterdir())) == 2 * len(chain)
            behind = [link.num_bytes for link in chain[1:]]
            assert sum(behind[:-1]) < sender.manifest.num_bytes


def made(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Sender, FolderWeights, FolderWeights]:
    """Two versions, of which one receiver has the first; another one has none."""
    sender = Sender(made(), tmp_path)
    follows = opened(sender)
    sender.send(1)
    follows.stage(1)
    sender.weights["a"][3, 1] += 1
    sender.send(2)
    return (
        sender,
        follows,
        FolderWeights(
            {"chain": follows.chain, "manifest": sender.manifest.constructor_arguments()}, index=1
        ),
    )


def harm(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(data[:-1])
    elif how == "flipped":
        path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    elif how == "no link":
        path.write_text("[]")
    elif how == "builds on itself":
        change_link(path, builds_on=2)
    elif how == "builds on nothing":
        change_link(path, builds_on=None)
    elif how == "says another version":
        change_link(path, version=1)
    elif how == "of other sizes":
        change_link(path, messages=[[[-1, ""] for _ in json.loads(data)["messages"][0]]])
    elif how == "shortened":
        change_link(path, messages=[json.loads(data)["messages"][0][:-1]])
    elif how == "of no rank":
        change_link(path, messages=[])
    elif how == "of a rank too many":
        change_link(path, messages=json.loads(data)["messages"] * 2)
    elif how == "the version before's":
        path.write_bytes(Path(str(path).replace("-2.", "-1.")).read_bytes())


def change_link(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("file", "how", "complaint"),
    [
        ("2.0", "missing", "No such file"),
        ("2.0", "torn", r"2\.0 is torn"),
        ("2.0", "flipped", r"2\.0 is torn"),
        ("2.json", "missing", "No such file"),
        ("2.json", "torn", "Expecting"),
        ("2.json", "no link", "mapping"),
        ("2.json", "builds on itself", r"2\.json builds on version 2"),
        ("2.json", "of other sizes", "negative"),
        ("2.0", "the version before's", r"2\.0 is torn"),
        ("2.json", "the version before's", r"2\.json is the link of version 1"),
        ("2.json", "says another version", r"2\.json is the link of version 1"),
        ("2.json", "builds on nothing", r"2\.0 is torn"),
        ("2.json", "shortened", r"2\.json has .* messages of rank 0"),
        ("2.json", "of no rank", r"2\.json has 0 messages of rank 0"),
        ("2.json", "of a rank too many", r"2\.json has .* messages of rank 1, which has 0"),
    ],
)
def test_damaged_weights_are_refused_and_the_whole_comes_next(
    chain: tuple[Sender, FolderWeights, FolderWeights], file: str, how: str, complaint: str
) -> None:
    sender, *receivers = chain
    path = Path(f"{receivers[0].chain}-{file}")
    before = path.read_bytes()
    harm(path, how)
    for receiver in receivers:
        with pytest.raises(RunError, match=f"could not read version 2 in .*{complaint}"):
            receiver.stage(2)
    path.write_bytes(before)  # it came late: the anchor and the chain are read
    for receiver in receivers:
        receiver.stage(2)
        assert_holds(receiver, sender.weights)
    again = opened(sender)
    sender.send(2)
    assert [link.builds_on for link in find_links(2, again.chain, known_version=None)] == [None]
    again.stage(2)
    assert_holds(again, sender.weights)
    assert not path.exists()


def test_version_copied_whole_to_the_next_name_is_refused(
    chain: tuple[Sender, FolderWeights, FolderWeights],
) -> None:
    """The link of version 2 with its number changed, and its messages, under the name of version
    3.
    """
    _, follows, late = chain
    for suffix in ("0", "json"):
        Path(f"{late.chain}-3.{suffix}").write_bytes(Path(f"{late.chain}-2.{suffix}").read_bytes())
    change_link(Path(f"{late.chain}-3.json"), version=3)
    for receiver in (follows, late):
        with pytest.raises(RunError, match=r"3\.0 is torn, or is another one's"):
            receiver.stage(3)


def test_link_that_is_missing_on_the_way_is_a_gap(
    chain: tuple[Sender, FolderWeights, FolderWeights],
) -> None:
    sender, follows, late = chain
    Path(f"{late.chain}-1.json").unlink()
    with pytest.raises(RunError, match="No such file"):
        late.stage(2)
    follows.stage(2)  # which has that version
    assert_holds(follows, sender.weights)


def test_other_bits_than_were_sent_are_noticed_by_name(
    chain: tuple[Sender, FolderWeights, FolderWeights],
) -> None:
    sender, follows, _ = chain
    follows._mirror.tensors["c"][2, 2] = 7
    with pytest.raises(RunError, match="other bits of c than were sent"):
        follows.stage(2)
    follows.stage(2)  # from the anchor on
    assert_holds(follows, sender.weights)


def test_version_is_written_once(chain: tuple[Sender, FolderWeights, FolderWeights]) -> None:
    sender, _, late = chain
    before = {path.name: path.stat().st_mtime_ns for path in sender._folder.iterdir()}
    sender.send(2)
    assert before == {path.name: path.stat().st_mtime_ns for path in sender._folder.iterdir()}
    late.stage(2)
    assert_holds(late, sender.weights)


@pytest.mark.parametrize("phase", ["compare", "write", "link"])
def test_failed_version_is_no_base_of_the_next(
    chain: tuple[Sender, FolderWeights, FolderWeights], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    sender, follows, late = chain

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {
        "compare": (SentParts, "encode_messages"),
        "write": (Path, "open"),
        "link": (folder_sender, "replace_text"),
    }
    sender.weights["a"][3, 1] += 1
    with monkeypatch.context() as patch:
        patch.setattr(*where[phase], full)
        with pytest.raises((RunError, OSError), match="No space left") as raised:
            sender.send(3)
    if phase != "compare":
        assert str(sender._folder) in str(raised.value) and "GiB, three times the weights" in str(
            raised.value
        )
        assert str(raised.value).endswith("make room, or name another --weight_sync_folder")
    with pytest.raises(RunError, match="could not read version 3"):
        late.stage(3)
    sender.send(3)
    assert [link.builds_on for link in find_links(3, late.chain, known_version=2)] == [None]
    follows.stage(3)
    assert_holds(follows, sender.weights)


@pytest.mark.parametrize("num_removed", [0, 1, 3])
def test_disk_that_is_full_while_a_chain_is_pruned_leaves_whole_weights(
    chain: tuple[Sender, FolderWeights, FolderWeights],
    monkeypatch: pytest.MonkeyPatch,
    num_removed: int,
) -> None:
    """Removing a file takes room on some file systems.

    The new anchor is whole by then, and the run can go on.
    """
    sender, follows, late = chain
    sender._anchor_every = 2
    sender.weights["a"][3, 1] += 1
    removed: list[Path] = []
    unlink = Path.unlink

    def remove_some(path: Path, missing_ok: bool = False) -> None:
        if len(removed) == num_removed:
            raise OSError(errno.ENOSPC, "No space left on device")
        removed.append(path)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", remove_some)
        with pytest.raises(RunError, match="No space left") as raised:
            sender.send(3)
    assert str(raised.value).endswith("make room, or name another --weight_sync_folder")
    for receiver in (follows, late):
        receiver.stage(3)
        assert_holds(receiver, sender.weights)
    sender.weights["c"][0, 0] += 1
    sender.send(4)
    for receiver in (
        follows,
        FolderWeights(
            {"chain": late.chain, "manifest": sender.manifest.constructor_arguments()}, index=1
        ),
    ):
        receiver.stage(4)
        assert_holds(receiver, sender.weights)
    assert {path.stem for path in sender._folder.iterdir()} == {f"{Path(late.chain).name}-4"}


def test_link_names_the_version(chain: tuple[Sender, FolderWeights, FolderWeights]) -> None:
    sender, follows, _ = chain
    said = json.loads(Path(f"{follows.chain}-2.json").read_text())
    assert (said["version"], said["builds_on"]) == (2, 1)
    (written,) = said["messages"]
    assert len(written) == len(sender.manifest.buckets)
    assert sum(size for size, _ in written) == Path(f"{follows.chain}-2.0").stat().st_size


def test_folder_of_each_run(tmp_path: Path) -> None:
    runs = [tmp_path / parent / "out" for parent in "xy"]
    assert choose_sync_folder(None, runs[0]) == runs[0] / "weight_sync"
    folders = {choose_sync_folder(str(tmp_path), run) for run in runs}
    assert len(folders) == 2 and {folder.parent for folder in folders} == {tmp_path}
    for folder in (*folders, *folders):
        assert make_folder(folder).is_dir()


@pytest.mark.parametrize("what", ["nothing", "a file"])
def test_folder_that_cannot_be_is_refused(tmp_path: Path, what: str) -> None:
    asked = tmp_path / "asked"
    if what == "a file":
        asked.write_text("")
    with pytest.raises(
        InputError, match=f"--weight_sync_folder {asked}: .*; name a folder that is there"
    ):
        make_folder(choose_sync_folder(str(asked), tmp_path))


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_folder_of_other_files_is_not_emptied(tmp_path: Path, what: str) -> None:
    folder = choose_sync_folder(None, tmp_path)
    theirs = tmp_path / "theirs" if what == "a link" else make_folder(folder)
    theirs.mkdir(exist_ok=True)
    if what == "a link":
        folder.symlink_to(theirs)
    else:
        (theirs / "notes.txt").touch()
    with pytest.raises(InputError, match=r"has notes\.txt|is a link"):
        make_folder(folder)


def test_remains_of_a_killed_run_are_no_hindrance(
    chain: tuple[Sender, FolderWeights, FolderWeights],
) -> None:
    sender, follows, _ = chain
    Path(sender._folder, f".{Path(follows.chain).name}-3.json.12-34.partial").touch()
    assert make_folder(sender._folder) == sender._folder
    opened(sender)
    assert not [*sender._folder.iterdir()]
