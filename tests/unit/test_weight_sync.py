"""How tensors are packed into buckets, and which way weights may travel."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.config.rollout_sections import FleetSection
from open_instruct.errors import InputError
from open_instruct.rollout.weight_backend import check_backend, choose_backend
from open_instruct.rollout.weight_manifest import WeightManifest


class TestBuckets:
    def test_whole_tensors_up_to_the_limit_and_larger_ones_alone(self) -> None:
        shapes = {"a": (3,), "b": (2, 2), "large": (100,), "c": (1,), "d": (7,), "e": (1,)}
        manifest = WeightManifest(shapes, dtype=torch.bfloat16, bucket_bytes=16)
        assert [[tensor.name for tensor in bucket.tensors] for bucket in manifest.buckets] == [
            *(["a", "b"], ["large"], ["c", "d"], ["e"]),
        ]
        assert [bucket.num_bytes for bucket in manifest.buckets] == [14, 200, 16, 2]
        assert (manifest.largest_bucket_bytes, manifest.num_bytes) == (200, 232)

    @given(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=20), st.integers(1, 400))
    def test_every_tensor_has_its_own_bytes(self, shapes: list[list[int]], bucket_bytes: int) -> None:
        named = {str(number): tuple(shape) for number, shape in enumerate(shapes)}
        manifest = WeightManifest(named, dtype=torch.float32, bucket_bytes=bucket_bytes)
        values = {}
        for bucket in manifest.buckets:
            assert bucket.num_bytes <= bucket_bytes or len(bucket.tensors) == 1
            flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for name, view in bucket.views(flat, torch.float32):
                assert view.shape == named[name]
                view.fill_(float(name) + 1)
            values |= {name: view.clone() for name, view in bucket.views(flat, torch.float32)}
            assert torch.count_nonzero(flat.view(torch.float32)) == bucket.num_bytes // 4
        assert list(values) == list(named)
        assert all((value == float(name) + 1).all() for name, value in values.items())
        assert manifest.num_bytes == sum(4 * math.prod(shape) for shape in named.values())

    def test_both_sides_pack_alike(self) -> None:
        manifest = WeightManifest({"a": (3, 5), "b": ()}, dtype=torch.bfloat16, bucket_bytes=8)
        again = WeightManifest.of_plain(json.loads(json.dumps(manifest.plain())))
        assert (again.buckets, again.dtype, again.shapes) == (manifest.buckets, manifest.dtype, manifest.shapes)


ONE_HOST = {"on_cuda": False, "single_device": False, "same_host": True}
HOSTS = ONE_HOST | {"same_host": False}
GPUS = HOSTS | {"on_cuda": True}
ONE_GPU = {"on_cuda": True, "single_device": True, "same_host": True}


class TestBackend:
    @pytest.mark.parametrize(
        ("where", "backend"), [(ONE_HOST, "shm"), (HOSTS, "gloo"), (GPUS, "nccl"), (ONE_GPU, "ipc")]
    )
    def test_auto_chooses_what_works(self, where: dict[str, bool], backend: str) -> None:
        assert choose_backend("auto", **where) == backend
        for flag in ("auto", backend):
            check_backend(FleetSection(weight_sync_backend=flag), **where)  # type: ignore[arg-type]

    def test_a_choice_is_kept(self) -> None:
        assert choose_backend("gloo", **GPUS) == "gloo"

    @pytest.mark.parametrize(
        ("flag", "where", "message"),
        [
            ("nccl", ONE_HOST, "there is no CUDA device; use auto, shm or gloo"),
            ("ipc", ONE_HOST, "there is no CUDA device"),
            ("ipc", GPUS, "only with --single_gpu_mode; use auto or nccl"),
            ("nccl", ONE_GPU, "needs a GPU for each process"),
            ("shm", HOSTS, "on several hosts.*use auto or gloo"),
        ],
    )
    def test_what_cannot_work_is_refused(self, flag: str, where: dict[str, bool], message: str) -> None:
        with pytest.raises(InputError, match=f"--weight_sync_backend {flag}: .*{message}"):
            check_backend(FleetSection(weight_sync_backend=flag), **where)  # type: ignore[arg-type]

    def test_systems_without_shared_memory_take_gloo(self, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
        monkeypatch.setattr("open_instruct.rollout.weight_backend.SHARED_MEMORY", tmp_path / "none")
        assert choose_backend("auto", **ONE_HOST) == "gloo"
        with pytest.raises(InputError, match="this system has no"):
            check_backend(FleetSection(weight_sync_backend="shm"), **ONE_HOST)
