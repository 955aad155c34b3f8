"""Boxes of tensors that one layout writes and another reads."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from open_instruct.models import box_files
from open_instruct.models.box_files import (
    Part,
    assign_boxes,
    hash_file,
    read_parts,
    write_hashed,
    write_tensors,
)

WHOLE = {
    "embeddings": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "norm": torch.tensor([1.0, -0.0, math.nan, 5e-324]).to(torch.bfloat16),
    "step": torch.tensor(3.0),
    "mask": torch.tensor([[True], [False]]),
}
# Rows of each rank; what is not named is on every rank.
LAYOUTS: dict[str, list[dict[str, slice]]] = {
    "one": [{}],
    "replicas_2": [{}, {}],
    "uneven_3": [
        {"embeddings": slice(0, 3)},
        {"embeddings": slice(3, 6)},
        {"embeddings": slice(6, 7)},
    ],
    "empty_4": [{"norm": slice(2 * rank, min(2 * rank + 2, 4))} for rank in range(4)],
    "hsdp_2x2": [
        {"embeddings": slice(0, 4), "norm": slice(0, 2)},
        {"embeddings": slice(4, 7), "norm": slice(2, 4)},
    ]
    * 2,
}


def parts_of(layout: str, rank: int, *, fill: float | None = None) -> dict[str, Part]:
    parts = {}
    for name, whole in WHOLE.items():
        rows = LAYOUTS[layout][rank].get(name)
        local = whole if rows is None else whole[rows]
        start = (
            (0,) * whole.dim()
            if rows is None
            else (min(rows.start, len(whole)),) + (0,) * (whole.dim() - 1)
        )
        local = local.clone() if fill is None else torch.full_like(local, fill)
        parts[name] = Part(local=local, start=start, shape=tuple(whole.shape))
    return parts


def write(folder: Path, layout: str) -> dict[str, dict[str, Any]]:
    """The index, once through JSON."""
    ranks = range(len(LAYOUTS[layout]))
    index = assign_boxes(
        [{name: part.claim for name, part in parts_of(layout, rank).items()} for rank in ranks]
    )
    for rank in ranks:
        own = [
            name for name, entry in index.items() if rank in [owner for owner, *_ in entry["boxes"]]
        ]
        parts = parts_of(layout, rank)
        write_tensors(folder / f"rank{rank}.safetensors", {name: parts[name].local for name in own})
    return json.loads(json.dumps(index))


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_any_layout_reads_what_any_other_wrote(tmp_path: Path, saved: str, loaded: str) -> None:
    index = write(tmp_path, saved)
    for rank in range(len(LAYOUTS[loaded])):
        parts = parts_of(loaded, rank, fill=1)
        read_parts(tmp_path, index, parts)
        for name, theirs in parts_of(loaded, rank).items():
            assert raw(parts[name].local) == raw(theirs.local), name


def test_each_box_is_written_once_and_the_work_is_shared() -> None:
    of_ranks = [
        {name: part.claim for name, part in parts_of("hsdp_2x2", rank).items()} for rank in range(4)
    ]
    index = assign_boxes(of_ranks)
    assert [owner for owner, *_ in index["embeddings"]["boxes"]] == [0, 1]
    # The replicas of those who write the large boxes write the small ones.
    assert [owner for owner, *_ in index["norm"]["boxes"]] == [2, 3]
    assert list(index) == sorted(WHOLE) and assign_boxes(of_ranks) == index


def test_file_is_safetensors_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written = write_tensors(tmp_path / name, WHOLE)
        content = (tmp_path / name).read_bytes()
        assert (written.num_bytes, written.xxh3) == (
            len(content),
            xxhash.xxh3_128(content).hexdigest(),
        )
        assert hash_file(tmp_path / name) == written.xxh3
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {name: raw(tensor) for name, tensor in load_file(tmp_path / "a").items()} == {
        name: raw(tensor) for name, tensor in WHOLE.items()
    }


def test_pieces_add_up_and_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(box_files, "PIECE_BYTES", 7)
    written = write_hashed(tmp_path / "file", [b"0123456789", b"", memoryview(b"abc" * 9)])
    assert (tmp_path / "file").read_bytes() == b"0123456789" + b"abc" * 9
    assert (written.num_bytes, written.xxh3) == (37, hash_file(tmp_path / "file"))
    assert synced == [37]


def change(index: Mapping[str, Any], name: str, **values: Any) -> dict[str, Any]:
    return {**index, name: {**index[name], **values}}


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            lambda index: {name: entry for name, entry in index.items() if name != "norm"},
            "it has no 'norm'",
        ),
        (
            lambda index: change(index, "norm", dtype="F32"),
            r"'norm' is F32 of shape \(4,\) there, BF16",
        ),
        (lambda index: change(index, "norm", shape=[5]), r"'norm' is BF16 of shape \(5,\) there"),
        (
            lambda index: change(index, "norm", boxes=index["norm"]["boxes"][:1]),
            "'norm' is not there whole",
        ),
        (
            lambda index: change(index, "norm", boxes=[[0, [0], [4]]]),
            "does not hold 'norm' as the index says",
        ),
    ],
)
def test_other_model_is_refused_before_anything_is_filled(
    tmp_path: Path, edit: Any, told: str
) -> None:
    index = edit(write(tmp_path, "hsdp_2x2"))
    parts = parts_of("one", 0, fill=1)
    with pytest.raises(ValueError, match=told):
        read_parts(tmp_path, index, parts)
    assert all(bool((part.local == 1).all()) for part in parts.values())


def test_ranks_that_do_not_hold_the_whole_cannot_save() -> None:
    half = {"norm": parts_of("hsdp_2x2", 0)["norm"].claim}
    with pytest.raises(ValueError, match="'norm' once and whole"):
        assign_boxes([half, half])
