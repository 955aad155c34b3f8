"""What may happen at once on streams and threads, and whether two of these touch one memory:
`Order`, by vector clocks.

Every thread of the host and every stream has a clock, that is how much it knows to be over of
everybody. What a thread launches on a stream knows what the thread knows; the thread learns of it
by `synchronize` alone, another stream by `wait_event`. An access to memory must know of the writes
before it, and a write of the reads too. Memory of the device goes back to the stream that it was
allocated on, when its last tensor goes: that stream must know of everybody's use when the next is
allocated there, or have been told by `record_stream`.

Within `watching`, on the pretended GPU of `device.py`; nothing is computed, so an order is not one
of many that were met, but what is guaranteed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.fake_cuda.device import PACKAGE
from tests.fake_cuda.device import Stream as SilentStream

Clock = dict[Any, int]
TESTS = str(Path(__file__).resolve().parents[1])
NO_ACCESS = ("prim::", "empty", "new_empty", "lift_fresh", "set_", "resize_")
MAKES_THE_HOST_WAIT = ("_local_scalar_dense", "nonzero", "masked_select", "bincount")


def join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        clock[actor] = max(clock.get(actor, 0), time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Of the bytes from `start` to `stop` of a storage, by a stream or thread at a time of its
    own.
    """

    by: Any
    time: int
    writes: bool
    start: int
    stop: int
    where: str

    def __str__(self) -> str:
        return f"{'written' if self.writes else 'read'} on {self.by} at {self.where}"


class Memory:
    """A storage: the accesses that a later one must know of."""

    def __init__(self, storage: Any, what: str, allocated_on: Any) -> None:
        self.weak, self.what, self.allocated_on = StorageWeakRef(storage), what, allocated_on
        self.is_pinned = False
        self.accesses: list[Access] = []
        self.used: dict[Any, Access] = {}  # by streams that it does not belong to
        self.recorded: set[Any] = set()

    def add(self, new: Access, clock: Clock) -> list[Access]:
        """Those that `new` would have to wait for, and does not."""
        touching = [it for it in self.accesses if it.start < new.stop and new.start < it.stop]
        conflicts = [it for it in touching if it.writes or new.writes]
        # What a write covers is over for those that know of the write; so is a read by the next one
        # of its stream.
        over = [
            it
            for it in touching
            if new.start <= it.start
            and it.stop <= new.stop
            and (new.writes or (not it.writes and it.by is new.by))
        ]
        self.accesses = [*(it for it in self.accesses if it not in over), new]
        return [it for it in conflicts if it.by is not new.by and clock.get(it.by, 0) < it.time]


class Order(TorchDispatchMode):
    """Finds races.

    With `threads_are_processes` every thread has a device's default stream of its own.
    """

    def __init__(self, *, threads_are_processes: bool = False) -> None:
        super().__init__()
        self.races: list[str] = []
        self.num_accesses = 0
        self._threads_are_processes = threads_are_processes
        self._clocks: dict[Any, Clock] = {}
        self._memories: dict[int, Memory] = {}
        self._used_elsewhere: dict[int, Memory] = {}
        self._given_back: dict[Any, list[Memory]] = {}
        self._lock = threading.RLock()
        self._local = threading.local()
        self._default = Stream(name="the default stream")

    # Who

    def clock(self, actor: Any) -> Clock:
        return self._clocks.setdefault(actor, {})

    @property
    def host(self) -> str:
        # One that Python does not know is autograd's, for which the main one waits.
        thread = threading._active.get(threading.get_ident(), threading.main_thread())  # type: ignore[attr-defined]
        return str(thread.name)

    @property
    def default(self) -> Stream:
        if not self._threads_are_processes:
            return self._default
        if not hasattr(self._local, "default"):
            self._local.default = Stream(name=f"the default stream of {self.host}")
        default: Stream = self._local.default
        return default

    @property
    def current(self) -> Stream:
        return getattr(self._local, "current", None) or self.default

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = getattr(self._local, "current", None)
        self._local.current = stream or before
        try:
            yield
        finally:
            self._local.current = before

    # What is known

    def told(self, actor: Any, clock: Clock) -> None:
        with self._lock:
            self.notice_freed()
            join(self.clock(actor), clock)

    def now(self, actor: Any) -> Clock:
        with self._lock:
            self.notice_freed()
            return dict(self.clock(actor))

    def synchronize_all(self) -> None:
        for actor in [*self._clocks]:
            if isinstance(actor, Stream):
                self.told(self.host, self.clock(actor))

    # Memory

    def touch(self, tensor: Any, *, by: Any, writes: bool) -> None:
        if tensor.numel() == 0:
            return
        memory = self.memory_of(tensor)
        start = tensor.storage_offset() * tensor.itemsize
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        clock = self.clock(by)
        access = Access(
            by=by,
            time=clock[by],
            writes=writes,
            start=start,
            stop=start + (last + 1) * tensor.itemsize,
            where=place(),
        )
        self.num_accesses += 1
        self.races += [
            f"{memory.what}: {it}, and {access}, which does not wait for it"
            for it in memory.add(access, clock)
        ]
        if isinstance(by, Stream) and memory.allocated_on not in (None, by):
            memory.used[by] = access
            self._used_elsewhere[tensor.untyped_storage()._cdata] = memory

    def memory_of(self, tensor: Any, *, on: Any = None) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.weak.expired():
            memory = Memory(
                storage, f"{tensor.device.type} {tuple(tensor.shape)} made at {place()}", on
            )
            self._memories[storage._cdata] = memory
            self.give_out(on)
        return memory

    def notice_freed(self) -> None:
        """What was freed since the last call goes back to the stream that it was allocated on."""
        for key, memory in [*self._used_elsewhere.items()]:
            if memory.weak.expired():
                del self._used_elsewhere[key]
                self._given_back.setdefault(memory.allocated_on, []).append(memory)

    def give_out(self, stream: Any) -> None:
        """The next that is allocated on a stream may be what was given back to it, which nobody may
        be using still.
        """
        knows = dict(self.clock(stream))
        join(knows, self.clock(self.host))
        for memory in self._given_back.pop(stream, ()):
            for user, access in memory.used.items():
                if user not in memory.recorded and knows.get(user, 0) < access.time:
                    self.races.append(
                        f"{memory.what}: {access}, and freed for {stream} before that is over"
                    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self._lock:  # fake tensors are for one thread at a time
            self.notice_freed()
            made = func(*args, **kwargs)
            # A sharded tensor is what the rank holds of it.
            self._note(
                func,
                *tree_map_only(DTensor, lambda tensor: tensor._local_tensor, (args, kwargs, made)),
            )
        return made

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any], made: Any) -> None:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in (*given, *results))
        stream = self.current
        for tensor in results:
            self.memory_of(tensor, on=stream if tensor.device.type == "cuda" else None)
        # PyTorch pins what it copies to the host while that goes on.
        goes_on = name == "_to_copy" and on_device and kwargs.get("non_blocking")
        if name == "_pin_memory" or kwargs.get("pin_memory") or goes_on:
            for tensor in results:
                self.memory_of(tensor).is_pinned = True
        if func.is_view or name.startswith(NO_ACCESS):
            return
        launched = stream if on_device else self.host
        join(self.clock(launched), self.clock(self.host))
        for actor in {launched, self.host}:
            self.clock(actor)[actor] = self.clock(actor).get(actor, 0) + 1
        join(self.clock(launched), self.clock(self.host))
        into = set(map(id, written_by(func, args, kwargs)))
        waits = name in MAKES_THE_HOST_WAIT
        is_copy = name in ("_to_copy", "copy_")
        for tensor in given:
            waits |= is_copy and on_device and not self._goes_on(tensor, args, kwargs)
        for tensor in given:
            self.touch(tensor, by=self._who(tensor, launched), writes=id(tensor) in into)
        if not into:
            for tensor in results:
                waits |= is_copy and on_device and not self._goes_on(tensor, args, kwargs)
                self.touch(tensor, by=self._who(tensor, launched), writes=True)
        if waits:
            join(self.clock(self.host), self.clock(launched))

    def _goes_on(self, tensor: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the host goes on while `tensor` is copied between it and the device."""
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return tensor.device.type == "cuda" or (
            bool(non_blocking) and self.memory_of(tensor).is_pinned
        )

    def _who(self, tensor: torch.Tensor, launched: Any) -> Any:
        """Memory of the host that is not pinned is read as an operation is launched."""
        if (
            tensor.device.type == "cuda"
            or self.memory_of(tensor).is_pinned
            or launched == self.host
        ):
            return launched
        return self.host


def written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    arguments = func._schema.arguments
    if func.namespace == "c10d":  # whose schemas say of no argument that it is written
        return tree_leaves(args[0])
    given = [
        *zip(arguments, args, strict=False),
        *((it, kwargs[it.name]) for it in arguments if it.name in kwargs),
    ]
    return [
        leaf
        for it, value in given
        if it.alias_info and it.alias_info.is_write
        for leaf in tree_leaves(value)
    ]


def place() -> str:
    """The nearest line of ours that is being run; of a test, if there is none of the package."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{Path(name).name}:{frame.f_lineno}"
        if not found and name.startswith(TESTS) and name != __file__:
            found = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found or "a thread of PyTorch's"


class Stream(SilentStream):
    """A stream, or an event: an event is what the stream knew when it was recorded."""

    def __init__(self, *arguments: Any, name: str = "", **more: Any) -> None:
        super().__init__()
        self.name = name or f"a stream made at {place()}"
        self.seen: Clock = {}

    def __repr__(self) -> str:
        return self.name

    def synchronize(self) -> None:
        ORDERS[-1].told(ORDERS[-1].host, self.seen or ORDERS[-1].now(self))

    def record_event(self, event: Any = None) -> Any:
        event = event or Stream(name="an event")
        event.seen = ORDERS[-1].now(self)
        return event

    def record(self, stream: Any = None) -> None:
        self.seen = ORDERS[-1].now(stream or ORDERS[-1].current)

    def wait_event(self, event: Any) -> None:
        ORDERS[-1].told(self, event.seen)

    def wait_stream(self, stream: Any) -> None:
        ORDERS[-1].told(self, ORDERS[-1].now(stream))

    def wait(self, stream: Any = None) -> None:
        ORDERS[-1].told(stream or ORDERS[-1].current, self.seen)


ORDERS: list[Order] = []
"""The one that is watching."""


@contextmanager
def watching(order: Order, gpu: TorchDispatchMode) -> Iterator[Order]:
    """Streams, events and threads tell `order` of themselves;

    `gpu` is the pretended one, which is entered already.
    """
    submit, result = ThreadPoolExecutor.submit, Future.result
    set_event, wait_event = threading.Event.set, threading.Event.wait
    known: dict[Any, Clock] = {}

    def watched_submit(executor: Any, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = order.now(order.host)

        def watched_work() -> Any:
            order.told(order.host, before)
            TorchDispatchMode.__enter__(gpu)
            try:
                with order:
                    value = work(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(gpu, None, None, None)
            known[future] = order.now(order.host)
            return value

        ready = threading.Lock()
        with ready:
            future = submit(executor, lambda: (ready.acquire(), watched_work())[1])
        return future

    def watched_result(future: Any, timeout: float | None = None) -> Any:
        value = result(future, timeout)
        order.told(order.host, known.get(future, {}))
        return value

    def watched_set(event: Any) -> None:
        known[event] = order.now(order.host)
        set_event(event)

    def watched_wait(event: Any, timeout: float | None = None) -> bool:
        is_set = wait_event(event, timeout)
        if is_set:
            order.told(order.host, known.get(event, {}))
        return is_set

    def record_stream(tensor: Any, stream: Any) -> None:
        order.memory_of(tensor).recorded.add(stream)

    with ExitStack() as stack:
        for owner, name, meant in (
            *((torch.cuda, kind, Stream) for kind in ("Stream", "Event")),
            (torch.cuda, "stream", order.on),
            (torch.cuda, "current_stream", lambda device=None: order.current),
            (torch.cuda, "default_stream", lambda device=None: order.default),
            (torch.cuda, "synchronize", lambda device=None: order.synchronize_all()),
            (torch.accelerator, "current_stream", lambda device=None: order.current),
            (torch.Tensor, "record_stream", record_stream),
            (ThreadPoolExecutor, "submit", watched_submit),
            (Future, "result", watched_result),
            (threading.Event, "set", watched_set),
            (threading.Event, "wait", watched_wait),
        ):
            stack.enter_context(patch.object(owner, name, meant))
        ORDERS.append(order)
        try:
            with order:
                yield order
        finally:
            ORDERS.pop()
