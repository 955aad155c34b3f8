"""The channel of broadcasts: members are connected as they join, and it is they who say who is
missing.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from open_instruct.core.errors import RunError
from open_instruct.parallel.listening import LOOPBACK
from open_instruct.weight_sync import progress
from open_instruct.weight_sync.broadcasts import ERROR_HANDLING, broadcast_group
from open_instruct.weight_sync.channel import wait_for_device
from open_instruct.weight_sync.progress import SyncProgress, abandon, learner_name, receiver_name
from open_instruct.weight_sync.receiver import EXTRA_PATIENCE_S, WeightReceiver

CPU = torch.device("cpu")
SENDER = learner_name(0)


class FakeNCCL:
    """As `ProcessGroupNCCL`: connected by what is first sent, which `is_completed` where all have
    sent it.
    """

    made: list[FakeNCCL]

    class Options:
        _timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.rank, self.size, self.timeout = rank, size, options._timeout
        self.error_handling = os.environ.get(ERROR_HANDLING)
        self.sent: list[int] = []
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor]) -> Any:
        self.sent.append(sum(tensor.nbytes for tensor in tensors))
        return SimpleNamespace(is_completed=self._all_are_here, wait=lambda: None)

    def _all_are_here(self) -> bool:
        return sum(bool(group.sent) for group in self.made) == self.size


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNCCL]:
    monkeypatch.setattr(FakeNCCL, "made", [], raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    return FakeNCCL


def members(backend: str, *, timeout_s: float, num_receivers_that_come: int) -> list[Any]:
    """Have the sender and so many of two receivers connect at the same time; returns their groups
    or errors.
    """
    host = SyncProgress.host(LOOPBACK, timeout_s=timeout_s)
    info = {
        "backend": backend,
        "address": LOOPBACK,
        "port": host.store.port,
        "timeout_s": timeout_s,
    }
    info["num_receivers"] = 2
    progresses = [host] + [
        SyncProgress.join(info, member=receiver_name(index), patience_s=EXTRA_PATIENCE_S)
        for index in range(num_receivers_that_come)
    ]

    def member(rank: int) -> Any:
        try:
            return broadcast_group(info, progresses[rank], sender=SENDER, rank=rank, device=CPU)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(len(progresses)) as threads:
        return list(threads.map(member, range(len(progresses))))


def test_communicators_are_made_as_members_join(nccl: type[FakeNCCL]) -> None:
    """Not within the first send, where a receiver that is slow to come would count as one that does
    not take it.
    """
    groups = members("nccl", timeout_s=20.0, num_receivers_that_come=2)
    assert [(group.rank, group.size, group.sent) for group in groups] == [
        (rank, 3, [1]) for rank in range(3)
    ]


def test_missing_member_is_named_before_anything_blocks(
    nccl: type[FakeNCCL],
) -> None:
    """Making a communicator blocks, in NCCL, without a word about whom it waits for."""
    complaints = members("nccl", timeout_s=0.5, num_receivers_that_come=1)
    expected = f"weight sync: learner 0 waited 0.5 s for receiver 1 to connect with {SENDER}"
    assert all(complaint.startswith(expected) for complaint in complaints), complaints
    assert nccl.made == []


def test_group_waits_longer_than_its_members_and_its_errors_end_no_process(
    nccl: type[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_HANDLING, "3")
    for group in members("nccl", timeout_s=30.0, num_receivers_that_come=2):
        assert group.timeout.total_seconds() >= 2 * 30.0 + EXTRA_PATIENCE_S
        # Torch's CleanUpOnly: gives the communicator up, not the process.
        assert group.error_handling == "2"
    assert os.environ[ERROR_HANDLING] == "3"  # the other groups of the process keep theirs
    for group in members("gloo", timeout_s=7.0, num_receivers_that_come=2):
        assert group.options._timeout.total_seconds() > 7.0 + EXTRA_PATIENCE_S


def test_member_waits_for_its_own_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the whole device would be waiting for the next bucket too, which is on its way on
    another stream.
    """
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append("device"))
    wait_for_device(torch.device("cuda", 0))
    assert waited == ["stream"]
    wait_for_device(CPU)
    assert waited == ["stream"]


class SlowChannel:
    """Stages until it is told of a failure, or of none."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.failure: RunError | None = None
        self.failed: list[BaseException] = []
        self.has_failed = threading.Event()

    def stage(self, version: int) -> None:
        assert self.may_end.wait(20)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        self.has_failed.set()


def test_channel_whose_end_is_known_late_does_not_end_the_next_one() -> None:
    """Its thread still waits for a learner that is gone when the engine stages from new
    learners.
    """
    old, new = SlowChannel(), SlowChannel()
    worker: Any = SimpleNamespace(device=CPU, incoming_weights=old)
    WeightReceiver.start_staging(worker, 1)
    worker.incoming_weights = new
    WeightReceiver.start_staging(worker, 1)
    old.failure = RunError("learner 0 is gone")
    old.may_end.set()
    assert old.has_failed.wait(20)
    assert (old.failed, new.failed) == ([old.failure], [])
    assert not WeightReceiver.has_staged(worker)
    new.may_end.set()
    worker.staging.result(20)
    assert WeightReceiver.has_staged(worker)


def test_channel_whose_learner_is_gone_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the engine whose failure is told is not asked for anything, not even whether it
    lives.
    """
    monkeypatch.setattr(progress, "SECONDS_FOR_LAST_WORDS", 0.2)
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    began_s = time.monotonic()
    abandon({"address": LOOPBACK, "port": port, "timeout_s": 300.0}, "engine 0 lost it")
    assert time.monotonic() - began_s < 60
