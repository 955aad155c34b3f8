"""What has changed of weights, told and taken in: the bits on both sides are the same, whatever
they are.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from open_instruct.core.boxes import Box
from open_instruct.models.shards import select_box, shard_box
from open_instruct.weight_sync import changes
from open_instruct.weight_sync.changes import (
    BITS,
    PLACES,
    RUNS,
    WHOLE,
    Message,
    Mirror,
    SentParts,
    build_change_bucket,
    build_change_manifest,
    encode_changes,
    expand_runs,
    find_changes_on_device,
    find_changes_on_host,
    view_bits,
)
from open_instruct.weight_sync.manifest import WeightManifest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = {torch.int16: torch.bfloat16, torch.int32: torch.float32}
NUM_VALUES = 60
# How ranks may hold a tensor of shape (20, 3): rows, columns, or a run of its values.
HOLDINGS: dict[str, dict[int, Box]] = {
    "rows": {0: (slice(0, 11), slice(0, 3)), 1: (slice(11, 20), slice(0, 3))},
    "columns": {0: (slice(0, 20), slice(0, 1)), 1: (slice(0, 20), slice(1, 3))},
    "a run": {0: (slice(0, 7),), 1: (slice(7, NUM_VALUES),)},
    "a copy of the other's": {1: (slice(0, 20), slice(0, 3))},
    "rows that are cut twice": {
        rank: shard_box(
            (20, 3), (2, 2), divmod(rank, 2), (_StridedShard(0, split_factor=2), Shard(0))
        )
        for rank in range(4)
    },
    "rows and columns": {
        rank: shard_box((20, 3), (2, 3), divmod(rank, 3), (Shard(0), Shard(1))) for rank in range(6)
    },
}


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """So that parts have several, and a shorter one last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "BLOCK_VALUES", 7)
        yield


@st.composite
def versions(
    draw: st.DrawFn, *, num_versions: int = 3
) -> tuple[torch.dtype, list[dict[str, torch.Tensor]]]:
    """Weights over some versions, as bits:

    NaN of any payload, infinities and -0.0 are among them.
    """
    dtype = draw(st.sampled_from(DTYPES))
    limit = 2 ** (8 * dtype.itemsize - 1)
    bits = st.integers(-limit, limit - 1)
    weights = {
        name: torch.tensor(
            draw(st.lists(bits, min_size=NUM_VALUES, max_size=NUM_VALUES)),
            dtype=BITS[dtype.itemsize],
        )
        for name in HOLDINGS
    }
    weights["one number"] = torch.tensor([draw(bits)], dtype=BITS[dtype.itemsize])
    found = [weights]
    for _ in range(num_versions - 1):
        after = {name: each.clone() for name, each in found[-1].items()}
        for name, place, length in draw(
            st.lists(
                st.tuples(
                    st.sampled_from(sorted(HOLDINGS)),
                    st.integers(0, NUM_VALUES),
                    st.integers(1, 40),
                )
            )
        ):
            after[name][place : place + length] += 1
        found.append(after)
    return dtype, [
        {
            name: each.view(dtype).view(() if len(each) == 1 else (20, 3))
            for name, each in weights.items()
        }
        for weights in found
    ]


def travel(
    senders: Mapping[int, SentParts],
    mirror: Mirror,
    manifest: WeightManifest,
    weights: Mapping[str, torch.Tensor],
) -> list[str | None]:
    """Send one version; what the receiver says of each message."""

    def told_by(rank: int) -> list[Message]:
        return list(
            senders[rank].encode_messages(
                lambda name: select_box(weights[name], manifest.boxes[name][rank]), has_digests=True
            )
        )

    messages = {rank: told_by(rank) for rank in senders}
    sizes = {rank: [sum(map(len, message)) for message in told] for rank, told in messages.items()}
    most = build_change_manifest(manifest).buckets
    answers = []
    for index in range(len(most)):
        bucket = build_change_bucket(
            manifest, index, {rank: told[index] for rank, told in sizes.items()}
        )
        assert bucket.num_bytes == most[index].num_bytes, (
            "a slot has room for whatever there is to tell"
        )
        for rank in bucket.parts:
            start, stop = bucket.span(rank)
            assert start == most[index].span(rank)[0] and stop - start == sizes[rank][index]
            assert stop <= most[index].span(rank)[1]
            answers.append(mirror.apply_message(index, rank, torch.cat(messages[rank][index])))
    return answers


def manifest_of(dtype: torch.dtype) -> WeightManifest:
    """With pieces of a tensor, several tensors in a bucket, and buckets that one rank alone has a
    part of.
    """
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(HOLDINGS, (20, 3)) | {"one number": ()}
    boxes: dict[str, dict[int, Box]] = HOLDINGS | {"one number": {0: ()}}
    manifest = WeightManifest(shapes, boxes, dtype=dtype, bucket_bytes=100)
    assert max(bucket.num_pieces for bucket in manifest.buckets) > 1
    return manifest


@given(versions())
def test_receiver_has_the_learners_bits(
    drawn: tuple[torch.dtype, list[dict[str, torch.Tensor]]],
) -> None:
    dtype, found = drawn
    manifest = manifest_of(dtype)
    senders, mirror = (
        {rank: SentParts(manifest, rank=rank) for rank in manifest.ranks},
        Mirror(manifest),
    )
    for weights in found:
        assert not any(travel(senders, mirror, manifest, weights))
        for name, each in weights.items():
            assert torch.equal(view_bits(mirror.tensors[name]), view_bits(each)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_that_equals_another_or_not_even_itself_is_told_from_every_other(
    dtype: torch.dtype,
) -> None:
    """Of 0.0 and -0.0, infinities, NaN of two payloads and both signs, and the least and the
    largest numbers.
    """
    info, bits = torch.finfo(dtype), BITS[dtype.itemsize]
    plain = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, info.smallest_normal, info.max], dtype=dtype
    )
    nan = plain[4:5].view(bits)
    least = torch.ones(1, dtype=bits)  # subnormal
    specials = torch.cat([plain.view(bits), nan | 1, nan | torch.iinfo(bits).min, least])
    pairs = torch.cartesian_prod(specials, specials).view(dtype)
    manifest = WeightManifest(
        {"w": (20, len(pairs))},
        {"w": {0: (slice(0, 20), slice(0, len(pairs)))}},
        dtype=dtype,
        bucket_bytes=2**20,
    )
    sender, mirror = {0: SentParts(manifest, rank=0)}, Mirror(manifest)
    for side in (0, 1):  # in one row of many, so that what has changed travels alone
        weights = {"w": torch.ones(20, len(pairs), dtype=dtype)}
        weights["w"][7] = pairs[:, side]
        assert travel(sender, mirror, manifest, weights) == [None]
        assert torch.equal(view_bits(mirror.tensors["w"]), view_bits(weights["w"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_that_is_another_one_is_noticed_by_name(dtype: torch.dtype) -> None:
    manifest = manifest_of(dtype)
    senders, mirror = (
        {rank: SentParts(manifest, rank=rank) for rank in manifest.ranks},
        Mirror(manifest),
    )
    weights = {name: torch.ones(shape, dtype=dtype) for name, shape in manifest.shapes.items()}
    travel(senders, mirror, manifest, weights)
    mirror.tensors["columns"][3, 1] = -1
    assert {*travel(senders, mirror, manifest, weights)} == {None, "columns"}


@pytest.mark.parametrize(
    ("before", "after", "form", "entries", "values"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 9, 4, 5, 6, 7, 8, 9], PLACES, [2], [9]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], PLACES, [], []),
        ([1] * 12, [1, 2, 2, 2, *[1] * 8], RUNS, [1, 3], [2, 2, 2]),
        ([1] * 20, [2, *[1] * 5, 3, 3, 3, 3, 3, *[1] * 9], RUNS, [0, 6, 1, 5], [2, 3, 3, 3, 3, 3]),
        ([1] * 6, [2, 2, *[1] * 4], WHOLE, [], [2, 2, 1, 1, 1, 1]),
        ([1] * 4, [2, 1, 1, 1], WHOLE, [], [2, 1, 1, 1]),
        ([1] * 16, [2] * 16, WHOLE, [], [2] * 16),
    ],
    ids=[
        "a place",
        "nothing",
        "a run",
        "two runs",
        "too little to save",
        "less but for zeros between",
        "all",
    ],
)
def test_form_is_that_of_the_fewest_bytes(
    before: list[int], after: list[int], form: int, entries: list[int], values: list[int]
) -> None:
    sent_N, now_N = (torch.tensor(each, dtype=torch.float32).bfloat16() for each in (before, after))
    told = encode_changes(view_bits(sent_N), now_N.float(), dtype=torch.bfloat16)
    assert torch.equal(sent_N, now_N)
    assert (told[0], told[1].tolist()) == (form, entries)
    assert told[2].view(torch.bfloat16).tolist() == values


@given(st.sampled_from([torch.uint8, torch.int16, torch.int32]), st.data())
def test_device_and_its_host_find_the_same_changes(dtype: torch.dtype, data: st.DataObject) -> None:
    """Wherever they lie in words of eight bytes, and in memory that begins in the middle of one."""
    bits = st.lists(st.integers(0, 1), min_size=1, max_size=40)
    both = data.draw(
        bits.flatmap(
            lambda one: st.tuples(
                st.just(one), st.lists(st.integers(0, 1), min_size=len(one), max_size=len(one))
            )
        )
    )
    start = data.draw(st.integers(0, 3))
    now, before = (torch.tensor([0] * start + side, dtype=dtype)[start:] for side in both)
    places = [place for place, (one, other) in enumerate(zip(*both, strict=True)) if one != other]
    for find in (find_changes_on_host, find_changes_on_device):
        found, values = find(now, before)
        assert found.tolist() == places and values.tolist() == now[places].tolist()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5))))
def test_runs_are_places(gaps_and_lengths: list[tuple[int, int]]) -> None:
    places: list[int] = []
    runs: list[Any] = []
    for gap, length in gaps_and_lengths:
        start = (places[-1] if places else -1) + 1 + gap
        runs.append((start, length))
        places += range(start, start + length)
    starts, lengths = ([run[which] for run in runs] for which in (0, 1))
    assert expand_runs(torch.tensor([*starts, *lengths], dtype=torch.int32)).tolist() == places


@pytest.mark.parametrize(
    ("dtype", "share", "run_length", "form"),
    [
        (torch.int16, 0.32, 1, PLACES),
        (torch.int16, 0.35, 1, WHOLE),
        (torch.int32, 0.45, 1, PLACES),
        (torch.int16, 0.45, 100, RUNS),
        (torch.int16, 0.55, 100, WHOLE),
    ],
    ids=str,
)
def test_bytes_decide_up_to_which_share_changes_travel(
    dtype: torch.dtype, share: float, run_length: int, form: int
) -> None:
    """At random up to a third of 16-bit values, and nearly half of 32-bit ones; in runs up to
    half.
    """
    generator = torch.Generator().manual_seed(0)
    changed = (
        torch.rand(10_000 // run_length, generator=generator).argsort()
        < share * 10_000 // run_length
    )
    after = changed.repeat_interleave(run_length).to(dtype)
    assert (
        encode_changes(torch.zeros_like(after), after.view(FLOATS[dtype]), dtype=FLOATS[dtype])[0]
        == form
    )
