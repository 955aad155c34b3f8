"""When the heap is trimmed between blocks."""

import torch

from open_instruct.training.model.host_heap import HeapTrimmer

MIB = 2**20


class Heap:
    """A process of so many bytes, of which `num_free` are given back by a trim."""

    def __init__(self, *, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_free = 0
        self.num_trims = 0

    def trim(self) -> None:
        self.num_bytes -= self.num_free
        self.num_free = 0
        self.num_trims += 1

    def build_trimmer(self) -> HeapTrimmer:
        return HeapTrimmer(trim=self.trim, measure_bytes=lambda: self.num_bytes)

    def grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_free += num_bytes


def test_heap_is_trimmed_only_above_what_was_needed() -> None:
    heap = Heap(num_bytes=10_000 * MIB)
    trimmer = heap.build_trimmer()
    trimmer.trim_if_grown()
    assert heap.num_trims == 1

    heap.grow(400 * MIB)
    trimmer.trim_if_grown()
    assert heap.num_trims == 1, "within a twentieth of what was needed"

    heap.grow(200 * MIB)
    trimmer.trim_if_grown()
    assert (heap.num_trims, heap.num_bytes) == (2, 10_000 * MIB)

    heap.num_bytes += 5_000 * MIB  # in use
    trimmer.trim_if_grown()
    trimmer.trim_if_grown()
    assert heap.num_trims == 3, "15,000 MiB are what it needs now"


def test_small_process_is_not_trimmed_for_little() -> None:
    heap = Heap(num_bytes=1_000 * MIB)
    trimmer = heap.build_trimmer()
    trimmer.trim_if_grown()
    heap.grow(200 * MIB)
    trimmer.trim_if_grown()
    assert heap.num_trims == 1
    heap.grow(100 * MIB)
    trimmer.trim_if_grown()
    assert (heap.num_trims, heap.num_bytes) == (2, 1_000 * MIB)


def test_blocks_trim_forward_and_backward_where_they_learn() -> None:
    heap = Heap(num_bytes=1_000 * MIB)
    trimmer = heap.build_trimmer()
    block = torch.nn.Linear(4, 4)
    trimmer.hook_block(block)
    inputs = torch.ones(2, 4)

    with torch.no_grad():
        block(inputs)
    assert heap.num_trims == 0

    output = block(inputs)
    assert heap.num_trims == 1
    heap.grow(300 * MIB)
    output.sum().backward()
    assert heap.num_trims == 2
