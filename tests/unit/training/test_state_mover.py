"""Storages of tensors go to host memory and come back, whoever refers to them."""

import mmap
from pathlib import Path

import pytest
import torch

from open_instruct.core.errors import RunError
from open_instruct.models.box_files import write_tensors
from open_instruct.models.storages import list_nested_tensors
from open_instruct.training.state_mover import StateMover

CPU = torch.device("cpu")


def test_views_and_tensors_come_back_bit_for_bit_in_their_objects() -> None:
    weights = torch.randn(50, 7)
    rows = weights[10:20]
    halves = torch.randn(33).bfloat16()
    empty = torch.empty(0)
    expected = [weights.clone(), rows.clone(), halves.clone()]
    listed = [rows, weights, halves, weights.view(-1), empty]
    # Blocks are smaller than a storage, so that one spans several.
    mover = StateMover(lambda: listed, CPU, block_bytes=64)
    move = mover.move_to_host()
    assert move.num_bytes == 50 * 7 * 4 + 33 * 2  # each storage once
    assert not mover.is_on_device
    assert weights.untyped_storage().nbytes() == halves.untyped_storage().nbytes() == 0
    torch.full((1000,), 7.0)  # takes what was freed
    assert mover.move_to_device().num_bytes == move.num_bytes
    assert all(map(torch.equal, (weights, rows, halves), expected))
    rows.zero_()
    assert not weights[10:20].any()  # still a view


def test_second_move_does_nothing_and_the_next_one_takes_new_values() -> None:
    weights = torch.ones(10)
    mover = StateMover(lambda: [weights], CPU)
    mover.move_to_host()
    assert mover.move_to_host().num_bytes == 0
    mover.move_to_device()
    assert mover.move_to_device().num_bytes == 0
    weights.mul_(3)
    mover.move_to_host()
    mover.move_to_device()
    assert torch.equal(weights, torch.full((10,), 3.0))


def test_tensors_of_another_device_stay() -> None:
    meta = torch.empty(10, device="meta")
    assert StateMover(lambda: [meta], CPU).move_to_host().num_bytes == 0
    assert meta.untyped_storage().nbytes() == 40


def test_memory_of_another_process_is_refused_by_its_tensor() -> None:
    shared = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.float32)
    with pytest.raises(RunError, match=r"\(1024,\)"):
        StateMover(lambda: [shared], CPU).move_to_host()


def test_weights_move_after_a_checkpoint_was_written(tmp_path: Path) -> None:
    weights = torch.randn(10)
    write_tensors(tmp_path / "weights.safetensors", {"w": weights})
    assert StateMover(lambda: [weights], CPU).move_to_host().num_bytes == 40


def test_nested_tensors_are_all_found() -> None:
    tensors = [torch.zeros(1) for _ in range(4)]
    nested = {"a": [tensors[0], (tensors[1], {"b": tensors[2]})], "c": 3, "d": tensors[3]}
    found = list(list_nested_tensors(nested))
    assert all(ours is theirs for ours, theirs in zip(found, tensors, strict=True))
