"""Changed weights are encoded in the shortest of three forms, and put in place by the receiver.

N: values of a part, C: changed values among them, R: runs of changed neighbours.

Values are compared and sent as bits, so that NaN and -0.0 are values like others. A learner's
message about a bucket has a row of int64 for each of its parts (form, number of entries, number of
values, digest). Behind the rows come, for each part, first the entries and then the values:

    WHOLE   no entries, all N values
    PLACES  C places in the flattened part, int32, and C values
    RUNS    R first places and R lengths, int32, and C values

The digest is XXH3 of the bits of the whole part as it is now, or 0 if the receiver is not to check.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import xxhash

from open_instruct.core.weight_buckets import PLACE_BYTES, ROW_BYTES
from open_instruct.models.shards import join_slabs, select_box
from open_instruct.weight_sync.channel import FindLocal
from open_instruct.weight_sync.manifest import Bucket, Manifest, Part, WeightManifest

WHOLE, PLACES, RUNS = range(3)
# A share of a part's values. Below, the shortest form is taken. Above, the whole is sent: where
# changes lie at random no form is shorter, and where they lie together runs would save less than
# half, and finding the places takes memory.
MOST_CHANGED = 0.5
BLOCK_VALUES = 2**19
BLOCK_VALUES_ON_DEVICE = 2**22  # larger, as the host waits for the device in every block
ALIGNMENT = 8  # bytes; every tensor in a message begins at a multiple
NOTHING = torch.empty(0, dtype=torch.int32)
BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
}

Message = list[torch.Tensor]
"""Pieces of bytes, to be read one behind the other."""
EncodedPart = tuple[int, torch.Tensor, torch.Tensor]
"""The form, the entries and the values of a part."""


class SentParts:
    """One learner's parts as it last sent them, on the host."""

    def __init__(self, manifest: WeightManifest, *, rank: int) -> None:
        self._manifest = manifest
        self._rank = rank
        self._sent: dict[tuple[int, str], torch.Tensor] = {}

    def encode_messages(self, find_local: FindLocal, *, has_digests: bool) -> Iterator[Message]:
        """Yield a message for each bucket; what it encodes counts as sent from then on.

        Args:
            find_local: returns the rank's local tensor of a name.
            has_digests: whether the receiver is to check the bits of every part.
        """
        for index in range(len(self._manifest.buckets)):
            yield self._encode_message(index, find_local, has_digests=has_digests)

    @torch.no_grad()
    def _encode_message(self, index: int, find_local: FindLocal, *, has_digests: bool) -> Message:
        rows: list[tuple[int, int, int, int]] = []
        pieces: Message = []
        parts = self._manifest.buckets[index].parts.get(self._rank, {})
        for name, part in parts.items():
            values_N = find_local(name)[part.local_box].reshape(-1)
            form, entries, values_C = self._encode_part((index, name), values_N)
            digest = 0
            if has_digests:
                digest = digest_bits(self._sent[index, name])
            rows.append((form, len(entries), len(values_C), digest))
            pieces += [_pad_bytes(entries), _pad_bytes(values_C)]
        head = torch.tensor(rows, dtype=torch.int64).view(-1)
        return [_pad_bytes(head), *pieces]

    def _encode_part(self, key: tuple[int, str], values_N: torch.Tensor) -> EncodedPart:
        """Encode a part (whole, or what has changed), and update what was last sent."""
        dtype = self._manifest.dtype
        sent_N = self._sent.get(key)
        if sent_N is not None:
            return encode_changes(sent_N, values_N, dtype=dtype)
        copy_N = torch.empty(len(values_N), dtype=dtype, pin_memory=values_N.is_cuda)
        sent_N = view_bits(copy_N.copy_(values_N))
        self._sent[key] = sent_N
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
        """Yield all tensors by name, as a checkpoint has their values."""
        for name, tensor in self.tensors.items():
            yield name, join_slabs(tensor, self._manifest.slabs.get(name, 1))

    def apply_message(self, index: int, rank: int, message: torch.Tensor) -> str | None:
        """Put in place what `rank` sent of a bucket.

        Returns the name of a tensor whose bits differ from those that were sent, or None.
        """
        parts = self._manifest.buckets[index].parts[rank]
        start = len(parts) * ROW_BYTES
        rows: list[list[int]] = message[:start].view(torch.int64).view(-1, 4).tolist()
        for (name, part), row in zip(parts.items(), rows, strict=True):
            form, num_entries, num_values, digest = row
            values = select_box(self.tensors[name], part.box)
            bits_N = view_bits(values)
            entries, start = read_values(message, start, num_entries, torch.int32)
            values_C, start = read_values(message, start, num_values, bits_N.dtype)
            if form == WHOLE:
                bits_N.copy_(values_C)
            elif form == PLACES:
                bits_N.numpy()[entries.long().numpy()] = values_C.numpy()
            else:
                bits_N.numpy()[expand_runs(entries).numpy()] = values_C.numpy()
            if not values.is_contiguous():  # the bits are a copy
                values.copy_(bits_N.view(values.dtype).view(values.shape))
            if digest and digest_bits(bits_N) != digest:
                return name
        return None


def encode_changes(
    sent_N: torch.Tensor, values_N: torch.Tensor, *, dtype: torch.dtype
) -> EncodedPart:
    """Encode what changed between the bits `sent_N` and the values, and update `sent_N`.

    The whole is sent as soon as more than `MOST_CHANGED` of the values are found changed. Each
    block of values goes through all steps at once, while it is in a core's cache.

    Example: from [1, 2, 3, 4, 5, 6] to [1, 2, 9, 4, 5, 6] the form is PLACES, the entry is 2, and
    the value is the bits of 9.
    """
    places: list[np.ndarray] = []
    values: list[np.ndarray] = []
    num_changed = 0
    start = 0
    size = BLOCK_VALUES_ON_DEVICE if values_N.is_cuda else BLOCK_VALUES
    find_changes = find_changes_on_device if values_N.is_cuda else find_changes_on_host
    for now_N, before_N in zip(values_N.split(size), sent_N.split(size), strict=True):
        bits_N = view_bits(now_N.to(dtype))
        places_C, values_C = find_changes(bits_N, before_N)
        num_changed += len(places_C)
        if num_changed > MOST_CHANGED * len(sent_N):
            sent_N.view(dtype).copy_(values_N)
            return WHOLE, NOTHING, sent_N
        before_N.numpy()[places_C] = values_C
        places.append((places_C + start).astype(np.int32))
        values.append(values_C)
        start += len(bits_N)
    places_C = np.concatenate(places)
    form, entries = choose_encoding(places_C, num_values=len(sent_N), itemsize=sent_N.itemsize)
    if form == WHOLE:
        return form, entries, sent_N
    return form, entries, torch.from_numpy(np.concatenate(values))


def find_changes_on_host(
    now_N: torch.Tensor, before_N: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Find the places where bits differ, and the bits of `now_N` there.

    W words of 8 bytes are compared first, and then the values within the D words that differ:
    looking through the outcome of a comparison takes longer than the comparison.
    """
    # Each of numpy's functions is three times as fast as torch's.
    now = np.from_dlpack(now_N)  # `numpy()` would have a learner's storage never be resized again
    before = np.from_dlpack(before_N)
    per_word = 8 // now.itemsize
    end_of_words = len(now) - len(now) % per_word
    now_W = now[:end_of_words].view(np.uint64)
    before_W = before[:end_of_words].view(np.uint64)
    words_D = np.flatnonzero(now_W != before_W)
    now_values = now_W.take(words_D).view(now.dtype)
    before_values = before_W.take(words_D).view(now.dtype)
    within_C = np.flatnonzero(now_values != before_values)
    shifts_D = (words_D - np.arange(len(words_D))) * per_word
    places_in_words = within_C + shifts_D.take(within_C // per_word)
    places_behind = np.flatnonzero(now[end_of_words:] != before[end_of_words:]) + end_of_words
    places_C = np.concatenate([places_in_words, places_behind])
    return places_C, now.take(places_C)


def find_changes_on_device(
    now_N: torch.Tensor, before_N: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Find the changes of `now_N`, which is on a device: only they come to the host."""
    places_C = (now_N != before_N.to(now_N.device)).nonzero().view(-1)
    return places_C.cpu().numpy(), now_N[places_C].cpu().numpy()


def choose_encoding(
    places_C: np.ndarray, *, num_values: int, itemsize: int
) -> tuple[int, torch.Tensor]:
    """Choose the shortest form for changes at these places of a part; returns it with its entries.

    Example: for a change at place 2 of six values of 2 bytes the form is PLACES, the entry is 2.
    """
    follows_C = np.diff(places_C) == 1  # whether a place is next to the one before it
    num_runs = len(places_C) - int(np.count_nonzero(follows_C))
    run_bytes = 2 * PLACE_BYTES * num_runs
    place_bytes = PLACE_BYTES * len(places_C)
    num_bytes = align(min(run_bytes, place_bytes)) + align(itemsize * len(places_C))
    if num_bytes >= align(itemsize * num_values):  # a slot has room for the whole
        return WHOLE, NOTHING
    if place_bytes <= run_bytes:
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


def read_values(
    message: torch.Tensor,
    start: int,
    count: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, int]:
    """Read `count` values from byte `start` of a message; also returns where the next begin."""
    stop = start + count * dtype.itemsize
    return message[start:stop].view(dtype), align(stop)


def build_change_manifest(whole: WeightManifest) -> Manifest:
    """Build the buckets of messages, each with the most bytes that it can have."""
    return Manifest(build_change_bucket(whole, index, {}) for index in range(len(whole.buckets)))


def build_change_bucket(whole: WeightManifest, index: int, sizes: Mapping[int, int]) -> Bucket:
    """Build a bucket of messages, one of each learner.

    A message begins at the same byte, however long the messages of other learners are.

    Args:
        sizes: by rank, the bytes of its message. A rank that is left out has its most.
    """
    name = str(index)
    messages: dict[int, dict[str, Part]] = {}
    start = 0
    for rank, parts in whole.buckets[index].parts.items():
        most_bytes = sum(ROW_BYTES + align(part.num_bytes) for part in parts.values())
        num_bytes = sizes.get(rank, most_bytes)
        message = Part(
            box=(slice(start, start + num_bytes),),
            local_box=(slice(0, num_bytes),),
            start=start,
            num_bytes=num_bytes,
        )
        messages[rank] = {name: message}
        start += most_bytes
    return Bucket(
        dtype=torch.uint8,
        shapes={name: (start,)},
        parts=messages,
        num_bytes=start,
    )


def view_bits(values: torch.Tensor) -> torch.Tensor:
    """View the values' bits as integers of one dim; a copy unless the values are contiguous."""
    return values.contiguous().view(-1).view(BITS[values.itemsize])


def digest_bits(bits_N: torch.Tensor) -> int:
    """XXH3 of 64 bits, as an int64."""
    data = np.from_dlpack(bits_N.view(torch.uint8)).data
    return int.from_bytes(xxhash.xxh3_64_digest(data), signed=True)


def align(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def _pad_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, with zeros up to a multiple of `ALIGNMENT`."""
    if len(values) == 0:
        values = NOTHING  # an empty array of numpy's cannot be viewed as bytes
    flat = values.view(torch.uint8)
    num_missing = align(len(flat)) - len(flat)
    if num_missing == 0:
        return flat
    return torch.nn.functional.pad(flat, (0, num_missing))
