"""Where streams and threads share memory, in the order that `order.py` watches: `python -m
tests.fake_cuda.orders`.

Prints a JSON object: of each case its races and how many accesses were looked at, or the error that
it ended in.
"""

import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.fake_cuda.cases import HSDP, OFFLOAD, QLORA, Case, leave_weights_alone, opened
from tests.fake_cuda.device import load_hooks, pretend_cuda, pretended_gpu

SHAPES = {"embeddings": (64, 8), "first": (16, 8), "second": (16, 8), "norm": (8,)}
BUCKET_BYTES = 600
NUM_VERSIONS = 3
TIMEOUT_S = 300.0


def steps_of(case: Case, folder: Path) -> Any:
    """All steps of a case as in `cases.py`: its rows are packed ahead by a thread, and copied to
    the device.
    """
    from tests.fake_cuda.order import Order, watching

    order = Order()
    modes: list[Any] = []

    @contextmanager
    def within() -> Iterator[None]:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        modes.append(_get_current_dispatch_mode())
        with watching(order, modes[0]):
            yield

    with opened(case, folder, within()) as (_, take_steps):
        take_steps()
    return order


def turns(folder: Path) -> Any:
    """A learner's state goes to the host and comes back, while other streams than the one that
    moves it compute with it, as those of FSDP and DeepSpeed do.
    """
    import torch

    from open_instruct.models.shards import local_part
    from open_instruct.training.state_mover import StateMover
    from tests.fake_cuda.memory import list_state
    from tests.fake_cuda.order import Order, watching

    order = Order()

    @contextmanager
    def within() -> Iterator[None]:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        with watching(order, _get_current_dispatch_mode()):
            yield

    case = Case(f"{HSDP} --compile_model false", "grpo", world=8)
    with opened(case, folder, within()) as (policy, take_steps):
        take_steps()
        tensors = [local_part(each).detach() for each in list_state(policy)]
        on_device = [each for each in tensors if each.device.type == "cuda"]
        mover = StateMover(partial(list_state, policy), torch.device("cuda", 0))
        side: Any = torch.cuda.Stream()
        for _ in range(2):
            with torch.cuda.stream(side):
                for each in on_device:
                    each.zero_()
            mover.move_to_host()
            mover.move_to_device()
            with torch.cuda.stream(side):
                for each in on_device:
                    each.abs()
    return order


def hurried_turns(caller: str) -> Callable[[Path], Any]:
    """The same, and that method of the mover does not wait for the device."""

    def run(folder: Path) -> Any:
        from open_instruct.training.state_mover import StateMover

        with without(StateMover, "_wait", caller):
            return turns(folder)

    return run


def saves(folder: Path) -> Any:
    """Two checkpoints that a thread copies and writes, with work beside and an update after each
    copy.
    """
    import torch

    from open_instruct.checkpoints import safe_checkpointer
    from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointer
    from tests.fake_cuda.order import Order, watching

    def write_own_files(part: Any, rank: int, tensors: Any, documents: Any) -> dict[str, Any]:
        for tensor in tensors.values():
            tensor.sum()  # the host reads its copy
        return {}

    order, gpu = Order(), pretended_gpu()
    with (
        gpu,
        watching(order, gpu),
        patch.object(safe_checkpointer, "write_own_files", write_own_files),
        patch.object(SafeCheckpointer, "_publish", lambda *_: None),
    ):
        weights = {name: torch.ones(shape, device="cuda") for name, shape in SHAPES.items()}
        module: Any = SimpleNamespace(state_dict_to_save=lambda: weights)
        checkpointer = SafeCheckpointer(work_dir=folder)
        for step in (1, 2):
            checkpointer.save_async(folder / f"step{step}", module, {"step": step})
            sum((weight * 2).sum() for weight in weights.values())  # a forward pass beside
            checkpointer.wait_for_copy()
            for weight in weights.values():
                weight.mul_(0.5)
        checkpointer.finish()
    return order


def hurried_run(folder: Path) -> Any:
    """A run whose loop does not know that a save has its copy; it happens to have it."""
    from open_instruct.checkpoints.safe_checkpointer import SafeCheckpointer

    def happens_to_have(checkpointer: Any) -> None:
        while checkpointer._under_way is not None and not checkpointer._under_way.copied.is_set():
            time.sleep(0.001)

    with patch.object(SafeCheckpointer, "wait_for_copy", happens_to_have):
        return saved_steps(folder)


def short_lived(*, is_recorded: bool) -> Any:
    """A tensor that goes while another stream may still read it."""
    import torch

    from tests.fake_cuda.order import Order, watching

    order, gpu = Order(), pretended_gpu()
    with gpu, watching(order, gpu):
        tensor, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        if is_recorded:
            tensor.record_stream(side)
        del tensor
        torch.ones(3, device="cuda")
    return order


def early_read(*, waits: bool) -> Any:
    """The host reads what is copied to it, which PyTorch lets it do before it is there."""
    import torch

    from tests.fake_cuda.order import Order, watching

    order, gpu = Order(), pretended_gpu()
    with gpu, watching(order, gpu):
        copy = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        copy.sum()
    return order


def saved_steps(folder: Path) -> Any:
    """Steps of a run that saves after each, by a thread, as its loop has them."""
    from olmo_core.train.utils import EnvRngStates

    from open_instruct.checkpoints import resume, safe_checkpointer
    from open_instruct.run import cadence
    from tests.fake_cuda import cases

    num_written = 0

    def write_own_files(part: Any, rank: int, tensors: Any, documents: Any) -> dict[str, Any]:
        nonlocal num_written
        for tensor in tensors.values():
            tensor.sum()
            num_written += 1
        return {}

    every_step = partial(cadence.Cadence, save_every=1)
    with ExitStack() as stack:
        for owner, name, meant in (
            (cases, "NUM_STEPS", 3),
            (cadence, "Cadence", lambda *, num_steps, save_every: every_step(num_steps=num_steps)),
            # The device has none.
            (EnvRngStates, "current_state", lambda: SimpleNamespace(as_dict=dict)),
            (resume, "check_weights", lambda *_, **__: None),  # all numbers that are read are 0
            (safe_checkpointer, "write_own_files", write_own_files),
            (safe_checkpointer, "gather_objects", lambda value: [value]),
            (safe_checkpointer, "together", lambda work, kind: work()),
            (safe_checkpointer, "all_reduce_value", lambda value, *_, **__: value),
            (safe_checkpointer.SafeCheckpointer, "_publish", lambda *_: None),
        ):
            stack.enter_context(patch.object(owner, name, meant))
        order = steps_of(Case("--single_gpu_mode", "sft", world=1), folder)
    assert num_written > 20
    return order


class Store:
    """In the place of a channel's store: who asks for a report knows what its member knew."""

    def __init__(self, order: Any) -> None:
        self._order = order
        self._reports: dict[str, Any] = {}
        self._texts: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._reports[key] = self._order.now(self._order.host)

    def check(self, keys: Sequence[str]) -> bool:
        if not all(key in self._reports for key in keys):
            return False
        for key in keys:
            self._order.told(self._order.host, self._reports[key])
        return True

    def delete_key(self, key: str) -> bool:
        return self._reports.pop(key, None) is not None

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        self._texts.setdefault(key, value.encode())
        self.set(key, "")
        return self._texts[key]

    def get(self, key: str) -> bytes:
        return self._texts[key]

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        from torch.distributed import DistStoreError

        until_s = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise DistStoreError("not all are there")
            time.sleep(0.0005)


class Communicator:
    """A member's end of a communicator of NCCL, which works on a stream of its own."""

    issued: dict[tuple[str, int], dict[int, Any]]

    def __init__(self, order: Any, sender: str, rank: int, size: int, issued: Any) -> None:
        from tests.fake_cuda.order import Stream

        self.order, self.sender, self.rank, self.size, self.issued = (
            order,
            sender,
            rank,
            size,
            issued,
        )
        self.stream = Stream(name=f"NCCL's stream of {sender}'s group at its rank {rank}")
        self.count = 0

    def broadcast(self, tensors: list[Any]) -> Any:
        (flat,) = tensors
        order = self.order
        self.stream.wait_stream(order.current)
        order.told(self.stream, order.now(order.host))
        with order._lock:
            clock = order.clock(self.stream)
            clock[self.stream] = clock.get(self.stream, 0) + 1
            order.touch(flat, by=self.stream, writes=self.rank != 0)
        members = self.issued.setdefault((self.sender, self.count), {})
        members[self.rank] = order.now(self.stream)
        self.count += 1
        # The sender is done with it whether the others have it or not; they have it after the
        # sender.
        needed = set(range(self.size)) if self.rank else {0}

        def is_completed() -> bool:
            if not needed <= members.keys():
                return False
            order.told(order.host, known())
            return True

        def known() -> dict[Any, int]:
            from tests.fake_cuda.order import join

            together: dict[Any, int] = {}
            for rank in needed:
                join(together, members[rank])
            return together

        def wait() -> None:
            while not needed <= members.keys():
                time.sleep(0.001)
            order.told(order.current, known())

        return SimpleNamespace(is_completed=is_completed, wait=wait, keeps=flat)

    def abort(self) -> None:
        pass


class Channel:
    """Some versions through a way of weights; every member is a thread that stands for a
    process.
    """

    def __init__(self, way: str, num_learners: int, num_receivers: int) -> None:
        import torch

        from open_instruct.weight_sync.manifest import WeightManifest
        from open_instruct.weight_sync.progress import learner_name, receiver_name
        from open_instruct.weight_sync.transports import TRANSPORTS
        from tests.fake_cuda.order import Order

        self.order = Order(threads_are_processes=True)
        self.outgoing, _ = TRANSPORTS[way]
        self.device = torch.device("cuda", 0)
        self.learners = [learner_name(rank) for rank in range(num_learners)]
        self.receivers = [receiver_name(index) for index in range(num_receivers)]
        self.boxes = {
            name: {rank: rows_of(shape, rank, num_learners) for rank in range(num_learners)}
            for name, shape in SHAPES.items()
        }
        self.manifest = WeightManifest(
            SHAPES, self.boxes, dtype=torch.float32, bucket_bytes=BUCKET_BYTES
        )
        assert len(self.manifest.buckets) > 4
        self.info = {
            "backend": way,
            "num_receivers": num_receivers,
            "manifest": self.manifest.constructor_arguments(),
        }
        self.info["changes_alone"] = False
        self.store, self.issued, self.kept = Store(self.order), {}, []  # type: ignore[var-annotated]
        self.offered = threading.Event()

    def progress_of(self, member: str) -> Any:
        from open_instruct.weight_sync.progress import SyncProgress

        return SyncProgress(self.store, member=member, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]

    def learn(self, rank: int) -> None:
        import torch

        from open_instruct.weight_sync.progress import HOST_RANK
        from open_instruct.weight_sync.sender import WeightSender

        outgoing = self.outgoing(self.manifest, index=rank, device=self.device)
        progress = self.progress_of(self.learners[rank])
        if rank == HOST_RANK:
            self.info |= outgoing.offer()
            self.offered.set()
        assert self.offered.wait(TIMEOUT_S)
        outgoing.join(self.info)
        progress.report("joined")
        progress.wait("joined", [*self.learners, *self.receivers], to="join")
        outgoing.connect(self.info, progress)
        shapes = {
            name: [part.stop - part.start for part in self.boxes[name][rank]] for name in SHAPES
        }
        held = {name: torch.ones(shape, device=self.device) for name, shape in shapes.items()}
        sender: Any = SimpleNamespace(
            manifest=self.manifest, _position=0, _receivers=self.receivers
        )
        for version in range(NUM_VERSIONS):
            progress.new_round()
            progress.wait(f"began/{sender._position}", self.receivers, to="begin")
            if rank == HOST_RANK:
                progress.report(f"go/{sender._position}")
            WeightSender._send_buckets(sender, outgoing, repeat(held.__getitem__), version)
            sender._position += len(self.manifest.buckets)
            for tensor in held.values():
                tensor.mul_(2)

    def receive(self, index: int) -> None:
        import torch

        from open_instruct.weight_sync.receiver import IncomingWeights

        assert self.offered.wait(TIMEOUT_S)
        incoming = IncomingWeights(self.info, index=index, device=self.device)
        model = {name: torch.zeros(shape, device=self.device) for name, shape in SHAPES.items()}
        for _ in range(NUM_VERSIONS):
            for weights in incoming.buckets():
                for name, tensor in weights:
                    model[name].copy_(tensor)

    def take_part(self, member: Callable[[int], None], number: int) -> None:
        """One that fails ends the others' waits."""
        try:
            member(number)
        except BaseException:
            self.progress_of("").fail(traceback.format_exc())
            raise

    def export(self, slots: Any) -> tuple[Any, ...]:
        self.kept.append(slots)  # another process would keep them too
        return (slots,)

    def group(
        self, info: Any, progress: Any, *, sender: str, rank: int, device: Any
    ) -> Communicator:
        return Communicator(self.order, sender, rank, len(self.receivers) + 1, self.issued)


def channel(way: str, num_learners: int, num_receivers: int) -> Any:
    from open_instruct.weight_sync import broadcasts, receiver, slots
    from tests.fake_cuda.order import watching

    it, gpu = Channel(way, num_learners, num_receivers), pretended_gpu()
    with (
        gpu,
        watching(it.order, gpu),
        patch.object(broadcasts, "broadcast_group", it.group),
        patch.object(slots, "export_device_slots", it.export),
        patch.object(slots, "import_device_slots", lambda arguments, _: arguments[0]),
        patch.object(
            receiver.SyncProgress, "join", lambda _, *, member, patience_s: it.progress_of(member)
        ),
        ThreadPoolExecutor(num_learners + num_receivers, thread_name_prefix=way) as threads,
    ):
        members = [threads.submit(it.take_part, it.learn, rank) for rank in range(num_learners)]
        members += [
            threads.submit(it.take_part, it.receive, index) for index in range(num_receivers)
        ]
        for member in members:
            member.result()
    return it.order


def rows_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[slice, ...]:
    """The box of a tensor that a rank has: its share of the rows."""
    rows = shape[0] // num_ranks
    return (slice(rank * rows, (rank + 1) * rows), *(slice(0, size) for size in shape[1:]))


def main(names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        load_hooks(folder)
        pretend_cuda()
        leave_weights_alone()
        results: dict[str, Any] = {}
        for name in names or CASES:
            try:
                began = time.monotonic()
                order = CASES[name](folder / name.replace(" ", "_"))
                results[name] = {
                    "races": order.races,
                    "num_accesses": order.num_accesses,
                    "s": time.monotonic() - began,
                }
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    print(json.dumps(results))


@contextmanager
def without(owner: Any, name: str, caller: str) -> Iterator[None]:
    """Within, the method does nothing where a function of that name calls it."""
    whole = getattr(owner, name)

    def maybe(*args: Any, **kwargs: Any) -> Any:
        return None if sys._getframe(1).f_code.co_name == caller else whole(*args, **kwargs)

    with patch.object(owner, name, maybe):
        yield


def planted(case: str, name: str, caller: str) -> Callable[[Path], Any]:
    """A case in which `caller` does not call a stream's method of that name."""

    def run(folder: Path) -> Any:
        from tests.fake_cuda.order import Stream

        with without(Stream, name, caller):
            return CASES[case](folder)

    return run


CASES: dict[str, Callable[[Path], Any]] = {
    "batches ahead": lambda folder: steps_of(Case("--single_gpu_mode", "sft", world=1), folder),
    "inputs on the host": lambda folder: steps_of(
        Case(f"{OFFLOAD} --single_gpu_mode", family="olmo3", world=1), folder
    ),
    "sharded steps": lambda folder: steps_of(
        Case(f"{HSDP} --compile_model false", "sft", world=8), folder
    ),
    "weights on the host": lambda folder: steps_of(
        Case(f"--offload --ref_policy_update_freq 1 {HSDP} --compile_model false", world=8), folder
    ),
    "4 bits on the host": lambda folder: steps_of(
        Case(f"--offload {QLORA} {HSDP} --compile_model false", world=8), folder
    ),
    "turns": turns,
    "saves": saves,
    "saves of a run": saved_steps,
    "weights by nccl": lambda _: channel("nccl", 2, 2),
    "weights by ipc": lambda _: channel("ipc", 1, 1),
}
CASES |= {
    "a tensor that is recorded": lambda _: short_lived(is_recorded=True),
    "a tensor that is not recorded": lambda _: short_lived(is_recorded=False),
    "a copy that is waited for": lambda _: early_read(waits=True),
    "a copy that is read too early": lambda _: early_read(waits=False),
    "inputs on the host, read before they are back": planted(
        "inputs on the host", "wait_event", "unpack"
    ),
    "inputs on the host, let go before they are out": planted(
        "inputs on the host", "wait_event", "pack"
    ),
    "sharded steps, read before they are gathered": planted(
        "sharded steps", "wait_event", "foreach_all_gather_copy_out"
    ),
    "sharded steps, reduced before they are computed": planted(
        "sharded steps", "wait_stream", "foreach_reduce"
    ),
    "weights on the host, stepped before gradients are there": planted(
        "weights on the host", "synchronize", "finalize_backward"
    ),
    "turns, moved before they are computed": hurried_turns("move_to_host"),
    "turns, computed with before they are back": hurried_turns("move_to_device"),
    "saves of a run, changed before they are copied": hurried_run,
    "saves, read before they are copied": planted("saves", "synchronize", "copy_to_host"),
    "saves, copied before they are computed": planted("saves", "wait_stream", "copy_to_host"),
    "weights by nccl, sent before they are packed": planted(
        "weights by nccl", "wait_stream", "broadcast"
    ),
    "weights by ipc, told before they are written": planted(
        "weights by ipc", "synchronize", "wait_for_device"
    ),
}


if __name__ == "__main__":
    main(sys.argv[1:])
