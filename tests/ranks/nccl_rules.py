"""What NCCL asks of a process and gloo does not, checked on what a weight sync over gloo asks of
its groups.

Within `recorded`, the channel of `--weight_sync_backend nccl` is one of gloo, whose members note
every call; `breaches` compares the notes of all members. The rules are those of NCCL's user guide:

- members of a communicator call the same operations, of the same size, in the same order
  (broadcasts are from rank 0);
- a process that is in several communicators calls in an order that agrees with all others':
  together, the orders of all processes have no circle, or kernels of two communicators may wait for
  each other;
- a tensor is on the device, is not empty and is in one piece;
- one thread at a time uses a communicator.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch

from open_instruct.weight_sync import broadcasts, receiver
from open_instruct.weight_sync.receiver import IncomingWeights
from open_instruct.weight_sync.sender import WeightSender
from open_instruct.weight_sync.transports import ON_DEVICE

DEVICE = torch.device("cuda", 0)

Call = dict[str, Any]
"""group, member: of it; what: operation, bytes and dtype; faults: of this call alone."""


class OnDevice:
    """What is asked for on the device is made on the CPU, and remembered."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def made_by(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if device is None or torch.device(device).type != "cuda":
                return make(*args, **kwargs)
            tensor = make(*args, **kwargs | {"device": "cpu"})
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        return made

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.kept


class Recorded:
    """A group whose calls are noted."""

    def __init__(
        self, group: Any, name: str, member: int, device: OnDevice, notes: list[Call]
    ) -> None:
        self._group, self._name, self._member, self._device, self._notes = (
            group,
            name,
            member,
            device,
            notes,
        )
        self._in_use = threading.Lock()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Any:
        (tensor,) = tensors
        faults = []
        if not self._device.has(tensor):
            faults.append("a tensor of the host")
        if tensor.numel() == 0 or not tensor.is_contiguous():
            faults.append("a tensor that is empty or not in one piece")
        is_alone = self._in_use.acquire(blocking=False)
        if not is_alone:
            faults.append("a second thread")
        what = f"broadcast of {tensor.nbytes} bytes of {tensor.dtype}"
        self._notes.append(
            {"group": self._name, "member": self._member, "what": what, "faults": faults}
        )
        try:
            return self._group.broadcast(tensors)
        finally:
            if is_alone:
                self._in_use.release()

    def abort(self) -> None:
        self._group.abort()


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Yields the notes of this process, in the order of its calls."""
    notes: list[Call] = []
    device = OnDevice()
    opened: Counter[str] = Counter()
    make, open_sender, init_receiver = (
        broadcasts._make_group,
        WeightSender.open,
        IncomingWeights.__init__,
    )

    def group(info: Any, store: Any, *, sender: str, rank: int) -> Any:
        if info["backend"] != "nccl":
            return make(info, store, sender=sender, rank=rank)
        opened[sender] += 1
        name = f"{sender} in channel {opened[sender]}"
        return Recorded(
            make({**info, "backend": "gloo"}, store, sender=sender, rank=rank),
            name,
            rank,
            device,
            notes,
        )

    def open_on_device(sender: WeightSender, num_receivers: int) -> dict[str, Any]:
        if sender._backend in ON_DEVICE:
            sender._device = DEVICE
        return open_sender(sender, num_receivers)

    def init_on_device(
        incoming: IncomingWeights, info: Any, *, index: int, device: torch.device
    ) -> None:
        init_receiver(incoming, info, index=index, device=DEVICE)

    with ExitStack() as stack:
        for owner, name, meant in (
            (broadcasts, "_make_group", group),
            (WeightSender, "open", open_on_device),
            (IncomingWeights, "__init__", init_on_device),
            (receiver, "wait_for_device", lambda _: None),
            (torch, "empty", device.made_by(torch.empty)),
            (torch, "zeros", device.made_by(torch.zeros)),
        ):
            stack.enter_context(patch.object(owner, name, meant))
        yield notes


def breaches(notes: Sequence[Sequence[Call]], *, broken_channels: Sequence[int] = ()) -> list[str]:
    """Of the rules, by the notes of each process; members of a channel that broke may have come to
    different points.
    """
    found = [
        f"{it['group']}: {fault} in {it['what']}"
        for calls in notes
        for it in calls
        for fault in it["faults"]
    ]
    of_group: dict[str, dict[int, list[str]]] = defaultdict(dict)
    before: dict[str, set[str]] = defaultdict(set)
    for calls in notes:
        last: set[str] = set()
        for call in calls:
            own = of_group[call["group"]].setdefault(call["member"], [])
            own.append(call["what"])
            operation = f"operation {len(own)} of {call['group']}"
            before[operation] |= last
            last = {operation}
    for group, members in of_group.items():
        is_broken = any(group.endswith(f"in channel {number}") for number in broken_channels)
        for number, together in enumerate(zip_longest(*members.values()), start=1):
            said = {what for what in together if what is not None or not is_broken}
            if len(said) > 1:
                found.append(
                    f"operation {number} of {group}: its members call "
                    f"{' and '.join(sorted(map(str, said)))}"
                )
                break
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        found.append(
            f"processes call in orders that do not agree: {' before '.join(error.args[1])}"
        )
    return found
