"""How tensors are packed into buckets, and which way weights may travel."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.lora import LoRASection
from open_instruct.models.build import build_model
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.models.shards import shard_box
from open_instruct.weight_sync.manifest import WeightManifest
from open_instruct.weight_sync.receiver import ReusedMemory
from open_instruct.weight_sync.sender import WeightSender
from open_instruct.weight_sync.transports import choose_transport
from tests.refusals import refused
from tests.unit.conftest import JoinAs


def manifest_of(
    shapes: dict[str, tuple[int, ...]], *, num_ranks: int, bucket_bytes: int
) -> WeightManifest:
    """Of tensors whose rows are cut as FSDP cuts them."""
    boxes = {}
    for name, shape in shapes.items():
        placements = [Shard(0)] if shape else [Replicate()]
        ranks = range(num_ranks) if shape else [0]
        boxes[name] = {rank: shard_box(shape, (num_ranks,), (rank,), placements) for rank in ranks}
    return WeightManifest(shapes, boxes, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)


class TestBuckets:
    def test_whole_tensors_up_to_the_limit_and_larger_ones_in_pieces(self) -> None:
        shapes = {"a": (3,), "b": (2, 2), "large": (20,), "c": (1,), "d": (7,), "e": (1,)}
        manifest = manifest_of(shapes, num_ranks=1, bucket_bytes=16)
        assert [
            (*bucket.shapes, bucket.piece, bucket.num_pieces) for bucket in manifest.buckets
        ] == [
            ("a", "b", 0, 1),
            *(("large", piece, 3) for piece in range(3)),
            ("c", "d", 0, 1),
            ("e", 0, 1),
        ]
        assert [bucket.num_bytes for bucket in manifest.buckets] == [14, 12, 14, 14, 16, 2]
        assert (
            manifest.largest_bucket_bytes,
            manifest.most_bytes_of_wholes,
            manifest.num_bytes,
        ) == (16, 40, 72)

    def test_every_rank_brings_its_share_of_every_piece(self) -> None:
        """No rank waits while others send, and none holds more than its share of a bucket."""
        manifest = manifest_of({"embeddings": (64, 8)}, num_ranks=4, bucket_bytes=256)
        assert len(manifest.buckets) == 4
        for bucket in manifest.buckets:
            assert [stop - start for start, stop in map(bucket.span, range(4))] == [64] * 4
        assert [
            manifest.buckets[1].parts[2]["embeddings"].box[0],
            manifest.buckets[1].parts[2]["embeddings"].local_box[0],
        ] == [
            slice(36, 40),
            slice(4, 8),
        ]

    def test_part_of_a_rank_is_one_run_of_bytes(self) -> None:
        (bucket,) = manifest_of({"a": (3, 2), "b": (4,)}, num_ranks=2, bucket_bytes=100).buckets
        assert [bucket.span(rank) for rank in range(3)] == [(0, 12), (12, 20), (0, 0)]
        assert [(name, part.start, part.num_bytes) for name, part in bucket.parts[1].items()] == [
            ("b", 12, 4),  # the smaller tensor is first
            ("a", 16, 4),
        ]

    @given(
        st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=20),
        st.integers(1, 400),
        st.integers(1, 4),
    )
    def test_receivers_unpack_what_ranks_packed(
        self, shapes: list[list[int]], bucket_bytes: int, num_ranks: int
    ) -> None:
        named = {str(number): tuple(shape) for number, shape in enumerate(shapes)}
        manifest = manifest_of(named, num_ranks=num_ranks, bucket_bytes=bucket_bytes)
        tensors = {name: torch.rand(shape) for name, shape in named.items()}
        unpacked = {}
        for bucket in manifest.buckets:
            # By less than a row of every rank, which is not cut.
            if bucket.num_bytes > bucket_bytes:
                assert len(bucket.shapes) == 1
                ((name, shape),) = bucket.shapes.items()
                assert bucket.num_bytes < bucket_bytes + 2 * num_ranks * math.prod(
                    shape[1:]
                ) or bucket.num_pieces == max(
                    box[0].stop - box[0].start if box else 1
                    for box in manifest.boxes[name].values()
                )
            flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for rank in manifest.ranks:
                start, stop = bucket.span(rank)
                own = {
                    name: tensors[name][box[rank]]
                    for name, box in manifest.boxes.items()
                    if rank in box
                }
                bucket.pack(flat[start:stop], own.__getitem__, rank=rank, first_byte=start)
            if bucket.piece == 0:
                memory = torch.zeros(bucket.num_bytes_of_wholes, dtype=torch.uint8)
                wholes = bucket.wholes(memory)
            for rank in manifest.ranks:
                start, stop = bucket.span(rank)
                bucket.unpack(flat[start:stop], wholes, rank=rank, first_byte=start)
            if bucket.piece == bucket.num_pieces - 1:
                unpacked |= wholes
            flat.zero_()  # which what was unpacked does not share
        assert list(unpacked) == list(named)
        assert all(torch.equal(unpacked[name], whole.bfloat16()) for name, whole in tensors.items())
        assert manifest.num_bytes == sum(2 * math.prod(shape) for shape in named.values())

    def test_both_sides_pack_alike(self) -> None:
        manifest = manifest_of({"a": (3, 5), "b": ()}, num_ranks=2, bucket_bytes=8)
        again = WeightManifest(**pickle.loads(pickle.dumps(manifest.constructor_arguments())))
        assert (again.buckets, again.dtype, again.ranks) == (
            manifest.buckets,
            manifest.dtype,
            [0, 1],
        )


def test_memory_is_given_out_again_once_no_view_of_it_is_left() -> None:
    memory = ReusedMemory(200, torch.device("cpu"))
    first = memory.take(100)
    address, view = first.data_ptr(), first.view(torch.bfloat16).view(5, 10)[2:3].T
    del first
    second = memory.take(50)
    assert second.data_ptr() != address
    assert torch.equal(view, torch.zeros(10, 1).bfloat16())
    del view
    third = memory.take(200)
    assert third.data_ptr() == address
    assert memory.take(60).data_ptr() not in (address, second.data_ptr())


def test_adapter_alone_is_a_fiftieth_of_the_bytes(join_as: JoinAs) -> None:
    join_as(0, 1)
    config = tiny_config("olmo2", SIZES["base"], vocab_size=SIZES["base"]["vocab_size"], tie=False)
    model = build_model(config)  # on the meta device
    add_adapters(model, LoRASection(use_lora=True, lora_r=16), dtype=torch.bfloat16)
    adapter, whole = (
        WeightSender(
            model,
            TensorNames(config),
            backend="gloo",
            dtype=torch.bfloat16,
            bucket_bytes=64 << 20,
            timeout_s=1,
            adapter_alone=alone,
        ).manifest.num_bytes
        for alone in (True, False)
    )
    assert 2 * 500e6 < whole < 2 * 550e6
    assert adapter <= 0.02 * whole


ONE_HOST = {"on_cuda": False, "single_device": False, "same_host": True}
HOSTS = ONE_HOST | {"same_host": False}
GPUS = HOSTS | {"on_cuda": True}
ONE_GPU = {"on_cuda": True, "single_device": True, "same_host": True}


class TestBackend:
    @pytest.mark.parametrize(
        ("where", "backend"), [(ONE_HOST, "shm"), (HOSTS, "gloo"), (GPUS, "nccl"), (ONE_GPU, "ipc")]
    )
    def test_auto_chooses_what_works(self, where: dict[str, bool], backend: str) -> None:
        assert choose_transport("auto", **where) == backend
        assert choose_transport(backend, **where) == backend

    def test_gpus_that_are_shared_in_turns_gather_before_they_hand_over(self) -> None:
        turns = {"takes_turns": True}
        for flag in ("auto", "ipc"):
            assert choose_transport(flag, **GPUS, **turns) == "gathered"
            assert choose_transport(flag, **ONE_GPU, **turns) == "ipc"
        assert choose_transport("auto", **ONE_HOST, **turns) == "shm"
        with refused("conflict", "weight_sync_backend"):
            choose_transport("ipc", **ONE_HOST, **turns)

    def test_engines_of_which_some_take_turns_are_all_reached_through_the_host(self) -> None:
        mixed = {"takes_turns": True, "has_free_engines": True}
        assert choose_transport("auto", **GPUS, **mixed) == "gloo"
        assert choose_transport("auto", **GPUS | {"same_host": True}, **mixed) == "shm"
        with refused("conflict", "weight_sync_backend"):
            choose_transport("ipc", **GPUS, **mixed)

    def test_choice_is_kept(self) -> None:
        assert choose_transport("gloo", **GPUS) == "gloo"
        assert {
            choose_transport("files", **where) for where in (ONE_HOST, HOSTS, GPUS, ONE_GPU)
        } == {"files"}

    @pytest.mark.parametrize(
        ("flag", "where", "message"),
        [
            ("nccl", ONE_HOST, "there is no CUDA device; use auto, shm or gloo"),
            ("ipc", ONE_HOST, "there is no CUDA device"),
            ("ipc", GPUS, "--single_gpu_mode; use auto or nccl"),
            ("nccl", ONE_GPU, "needs a GPU for each process"),
            ("shm", HOSTS, "on several hosts"),
        ],
    )
    def test_weight_sync_backend_that_cannot_work_is_refused(
        self, flag: str, where: dict[str, bool], message: str
    ) -> None:
        with refused("conflict", "weight_sync_backend", f"{flag}", message):
            choose_transport(flag, **where)

    def test_systems_without_shared_memory_take_gloo(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path
    ) -> None:
        monkeypatch.setattr("open_instruct.weight_sync.transports.SHARED_MEMORY", tmp_path / "none")
        assert choose_transport("auto", **ONE_HOST) == "gloo"
        with refused("conflict", "weight_sync_backend"):
            choose_transport("shm", **ONE_HOST)
