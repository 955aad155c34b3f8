"""What has changed of the weights since they were last sent, told in the fewest bytes of three
forms.

N: values of a part, C: those of them that have changed, R: runs of neighbours that have changed.

Values are compared and sent as bits, so that NaN and -0.0 are values like others. A learner's
message about a bucket has a row of int64 for each of its parts (form, number of entries, number of
values, digest), and behind the rows, for each part, first the entries and then the values:

    WHOLE   no entries, all N values
    PLACES  C places in the flattened part, int32, and C values
    RUNS    R first places and R lengths, int32, and C values

The digest is XXH3 of the bits of the whole part as it is now, or 0 where nobody is to look at it.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch
import xxhash

from open_instruct.core.weight_buckets import PLACE_BYTES, ROW_BYTES
from open_instruct.models.shards import at, in_order
from open_instruct.weight_sync.channel import FindLocal
from open_instruct.weight_sync.manifest import Bucket, Manifest, Part, WeightManifest

WHOLE, PLACES, RUNS = range(3)
# Of a part's values. Below, the bytes of all three forms decide. Above, no form takes fewer bytes
# than the whole where changes lie at random; where they lie together runs would save less than
# half, and places take memory to be found.
MOST_CHANGED = 0.5
BLOCK_VALUES = 2**19
BLOCK_VALUES_ON_DEVICE = 2**22  # for each, its host waits some times
ALIGNMENT = 8  # bytes; of whatever is read as a tensor of its own
NOTHING = torch.empty(0, dtype=torch.int32)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Message = list[torch.Tensor]
"""Pieces of bytes, to be read one behind the other."""
EncodedPart = tuple[int, torch.Tensor, torch.Tensor]  # of a part: the form, the entries, the values


class SentParts:
    """One learner's parts as it last sent them, on the host."""

    def __init__(self, manifest: WeightManifest, *, rank: int) -> None:
        self._manifest = manifest
        self._rank = rank
        self._sent: dict[tuple[int, str], torch.Tensor] = {}

    def messages(self, find_local: FindLocal, *, has_digests: bool) -> Iterator[Message]:
        """A message for each bucket, made when it is asked for. After the last, these are the parts
        as last sent.

        Args:
            find_local: returns the rank's local tensor of a name.
        """
        return (
            self._message(index, find_local, has_digests=has_digests)
            for index in range(len(self._manifest.buckets))
        )

    @torch.no_grad()
    def _message(self, index: int, find_local: FindLocal, *, has_digests: bool) -> Message:
        rows: list[tuple[int, int, int, int]] = []
        told: Message = []
        for name, part in self._manifest.buckets[index].parts.get(self._rank, {}).items():
            form, entries, values_C = self._changed(
                (index, name), find_local(name)[part.own].reshape(-1)
            )
            digest = digest_bits(self._sent[index, name]) if has_digests else 0
            rows.append((form, len(entries), len(values_C), digest))
            told += [_aligned(entries), _aligned(values_C)]
        return [_aligned(torch.tensor(rows, dtype=torch.int64).view(-1)), *told]

    def _changed(self, key: tuple[int, str], values_N: torch.Tensor) -> EncodedPart:
        """Encode the part (whole, or what has changed), and note it as what was last sent."""
        if (sent_N := self._sent.get(key)) is not None:
            return encode_changes(sent_N, values_N, dtype=self._manifest.dtype)
        kept_N = torch.empty(len(values_N), dtype=self._manifest.dtype, pin_memory=values_N.is_cuda)
        sent_N = self._sent[key] = view_bits(kept_N.copy_(values_N))
        return WHOLE, NOTHING, sent_N


class Mirror:
    """A receiver's copy of all weights, on the host, in the order in which their values travel."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self.tensors = {
            name: torch.zeros(shape, dtype=manifest.dtype)
            for name, shape in manifest.shapes.items()
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name, as a checkpoint has their values."""
        return (
            (name, in_order(each, self._manifest.slabs.get(name, 1)))
            for name, each in self.tensors.items()
        )

    def change(self, index: int, rank: int, message: torch.Tensor) -> str | None:
        """Take in what `rank` tells of a bucket; returns the name of a tensor whose digest is
        another one, if any.
        """
        parts = self._manifest.buckets[index].parts[rank]
        start = len(parts) * ROW_BYTES
        rows: list[list[int]] = message[:start].view(torch.int64).view(-1, 4).tolist()
        for (name, part), (form, num_entries, num_values, digest) in zip(
            parts.items(), rows, strict=True
        ):
            values = at(self.tensors[name], part.box)
            bits_N = view_bits(values)
            entries, start = read(message, start, num_entries, torch.int32)
            values_C, start = read(message, start, num_values, bits_N.dtype)
            if form == WHOLE:
                bits_N.copy_(values_C)
            else:
                places_C = entries.long() if form == PLACES else expand_runs(entries)
                bits_N.numpy()[places_C.numpy()] = values_C.numpy()
            if not values.is_contiguous():  # the bits are a copy
                values.copy_(bits_N.view(values.dtype).view(values.shape))
            if digest and digest_bits(bits_N) != digest:
                return name
        return None


def encode_changes(
    sent_N: torch.Tensor, values_N: torch.Tensor, *, dtype: torch.dtype
) -> EncodedPart:
    """Make `sent_N` the bits of the values in `dtype`; returns how what has changed is told.

    Where more than `MOST_CHANGED` of the values changed it is not looked for further. A block of
    values at a time goes through all that is done with it, while it is in a core's cache.

    Example: [1, 2, 3, 4, 5, 6] is renewed by [1, 2, 9, 4, 5, 6] with a value at one of its PLACES,
    2: the bits of 9.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    num_changed = start = 0
    size = BLOCK_VALUES_ON_DEVICE if values_N.is_cuda else BLOCK_VALUES
    for now_N, before_N in zip(values_N.split(size), sent_N.split(size), strict=True):
        bits_N = view_bits(now_N.to(dtype))
        places_C, values_C = (changes_on_device if bits_N.is_cuda else changes_on_host)(
            bits_N, before_N
        )
        num_changed += len(places_C)
        if num_changed > MOST_CHANGED * len(sent_N):
            sent_N.view(dtype).copy_(values_N)
            return WHOLE, NOTHING, sent_N
        before_N.numpy()[places_C] = values_C
        found.append(((places_C + start).astype(np.int32), values_C))
        start += len(bits_N)
    places_C, values_C = map(np.concatenate, zip(*found, strict=True))
    form, entries = choose_encoding(places_C, num_values=len(sent_N), itemsize=sent_N.itemsize)
    return form, entries, sent_N if form == WHOLE else torch.from_numpy(values_C)


def changes_on_host(now_N: torch.Tensor, before_N: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The places where bits differ, and those of `now_N` there.

    Words of 8 bytes are compared first, and then values within those that differ: looking through
    what was compared takes longer than comparing.
    """
    # Numpy's functions are three times as fast as torch's, all of them.
    now, before = now_N.numpy(), before_N.numpy()
    per_word = 8 // now.itemsize
    rest = len(now) - len(now) % per_word
    now_W, before_W = now[:rest].view(np.uint64), before[:rest].view(np.uint64)
    words_D = np.flatnonzero(now_W != before_W)
    within_C = np.flatnonzero(
        now_W.take(words_D).view(now.dtype) != before_W.take(words_D).view(now.dtype)
    )
    shifts_D = (words_D - np.arange(len(words_D))) * per_word
    of_rest = np.flatnonzero(now[rest:] != before[rest:]) + rest
    places_C = np.concatenate([within_C + shifts_D.take(within_C // per_word), of_rest])
    return places_C, now.take(places_C)


def changes_on_device(now_N: torch.Tensor, before_N: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The same where `now_N` is on a device, to which the bits before go, and from which only
    changes come.
    """
    places_C = (now_N != before_N.to(now_N.device)).nonzero().view(-1)
    return places_C.cpu().numpy(), now_N[places_C].cpu().numpy()


def choose_encoding(
    places_C: np.ndarray, *, num_values: int, itemsize: int
) -> tuple[int, torch.Tensor]:
    """The form of the fewest bytes in which changes at these places of a part can be told, and its
    entries.

    Example: of a change at place 2 of six values of 2 bytes the form is PLACES, the entry is 2.
    """
    follows_C = np.diff(places_C) == 1  # upon the place before it
    bytes_of_runs = 2 * PLACE_BYTES * (len(places_C) - int(np.count_nonzero(follows_C)))
    bytes_of_places = PLACE_BYTES * len(places_C)
    entries_and_values = aligned(min(bytes_of_runs, bytes_of_places)) + aligned(
        itemsize * len(places_C)
    )
    if entries_and_values >= aligned(itemsize * num_values):  # a slot has room for the whole
        return WHOLE, NOTHING
    if bytes_of_places <= bytes_of_runs:
        return PLACES, torch.from_numpy(places_C)
    first_R = np.concatenate([[0], np.flatnonzero(~follows_C) + 1])
    lengths_R = np.diff(first_R, append=len(places_C))
    return RUNS, torch.from_numpy(np.concatenate([places_C[first_R], lengths_R])).int()


def expand_runs(entries: torch.Tensor) -> torch.Tensor:
    """The places of all values of runs, from their first places and, behind these, their lengths.

    Example: `expand_runs(torch.tensor([2, 7, 3, 1]))` is [2, 3, 4, 7].
    """
    starts_R, lengths_R = entries.long().chunk(2)
    behind_R = torch.cumsum(lengths_R, 0)  # values up to the end of each run
    shifts_R = starts_R - behind_R + lengths_R
    return torch.arange(int(lengths_R.sum())) + torch.repeat_interleave(shifts_R, lengths_R)


def read(
    message: torch.Tensor, start: int, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    """As many values of a message as `count`, from the byte `start` on, and where the next ones
    begin.
    """
    stop = start + count * dtype.itemsize
    return message[start:stop].view(dtype), aligned(stop)


def manifest_of_changes(whole: WeightManifest) -> Manifest:
    """Buckets of messages of the most bytes that each can have;

    `bucket_of_changes` gives those that do travel.
    """
    return Manifest(bucket_of_changes(whole, index, {}) for index in range(len(whole.buckets)))


def bucket_of_changes(whole: WeightManifest, index: int, sizes: Mapping[int, int]) -> Bucket:
    """A bucket of messages; each learner's begins at a place of its own, whatever the others have
    to tell.

    Args:
        sizes: by rank, the bytes of its message; of others what they have at most.
    """
    bucket, name = whole.buckets[index], str(index)
    most = [
        sum(ROW_BYTES + aligned(part.num_bytes) for part in parts.values())
        for parts in bucket.parts.values()
    ]
    ends = [sum(most[:count]) for count in range(len(most) + 1)]
    parts = {}
    for rank, (start, stop) in zip(bucket.parts, pairwise(ends), strict=True):
        num_bytes = sizes.get(rank, stop - start)
        box, own = (slice(start, start + num_bytes),), (slice(0, num_bytes),)
        parts[rank] = {name: Part(box=box, own=own, start=start, num_bytes=num_bytes)}
    return Bucket(dtype=torch.uint8, shapes={name: (ends[-1],)}, parts=parts, num_bytes=ends[-1])


def view_bits(values: torch.Tensor) -> torch.Tensor:
    """The values' bits as integers of one dim, without a copy if they are contiguous."""
    return values.contiguous().view(-1).view(BITS[values.itemsize])


def digest_bits(bits_N: torch.Tensor) -> int:
    """XXH3 of 64 bits, as an int64."""
    return int.from_bytes(xxhash.xxh3_64_digest(bits_N.view(torch.uint8).numpy().data), signed=True)


def aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, and as many zeros as it takes."""
    # Those of numpy are no bytes where there are none.
    flat = (values if len(values) else NOTHING).view(torch.uint8)
    lacking = aligned(len(flat)) - len(flat)
    return torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat
