"""When the heap is trimmed between blocks."""

import torch

from open_instruct.training.model.host_heap import HeapTrimmer


class Heap:
    """A process of so many bytes, of which `num_free` are given back by a trim."""

    def __init__(self) -> None:
        self.num_bytes = 1000
        self.num_free = 0
        self.num_trims = 0

    def trim(self) -> None:
        self.num_bytes -= self.num_free
        self.num_free = 0
        self.num_trims += 1

    def build_trimmer(self) -> HeapTrimmer:
        return HeapTrimmer(trim=self.trim, measure_bytes=lambda: self.num_bytes)


def test_heap_is_trimmed_only_above_what_was_needed() -> None:
    heap = Heap()
    trimmer = heap.build_trimmer()
    trimmer.trim_if_grown()
    assert heap.num_trims == 1

    heap.num_bytes += 40
    heap.num_free = 40
    trimmer.trim_if_grown()
    assert heap.num_trims == 1, "within a twentieth of what was needed"

    heap.num_bytes += 20
    heap.num_free += 20
    trimmer.trim_if_grown()
    assert (heap.num_trims, heap.num_bytes) == (2, 1000)

    heap.num_bytes += 500  # in use
    trimmer.trim_if_grown()
    trimmer.trim_if_grown()
    assert heap.num_trims == 3, "1500 bytes are what it needs now"


def test_blocks_trim_forward_and_backward_where_they_learn() -> None:
    heap = Heap()
    trimmer = heap.build_trimmer()
    block = torch.nn.Linear(4, 4)
    trimmer.hook_block(block)
    inputs = torch.ones(2, 4)

    with torch.no_grad():
        block(inputs)
    assert heap.num_trims == 0

    output = block(inputs)
    assert heap.num_trims == 1
    heap.num_bytes += 100
    output.sum().backward()
    assert heap.num_trims == 2
