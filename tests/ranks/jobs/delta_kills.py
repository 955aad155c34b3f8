"""Versions of a tiny model go from a learner to two receivers, and now and then one of these
processes is killed.

The processes are forked here, where no thread has been started, and told by pipes what to do: an
end of a channel is the real one. Whoever is to die kills itself in the middle of the phase that it
was told, so that a seed gives the same run again. What was left is then given up, as the publisher
gives it up, and sent again by a new channel.
"""

import os
import random
import signal
import zlib
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash

from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.core.errors import RunError
from open_instruct.models.hf.names import TensorNames
from open_instruct.weight_sync.progress import abandon
from open_instruct.weight_sync.receiver import IncomingWeights
from open_instruct.weight_sync.sender import WeightSender
from tests.ranks.jobs.weights import unsharded

LEARNER, RECEIVERS = "learner", ("receiver 0", "receiver 1")
IN_RECEIVERS = ("stage", "apply", "between versions")
PHASES = {LEARNER: ("compare", "send"), **dict.fromkeys(RECEIVERS, IN_RECEIVERS)}
PHASES_OF_WHOLE_WEIGHTS = PHASES | {LEARNER: ("send",)}
KILLS_A_SYNC = 0.25
CHANGED = 0.02
PATIENCE_S = 60.0
# Within which everybody knows of a loss: half of the sync's own time-out, so that it is known
# otherwise.
BOUND_S = PATIENCE_S / 2


class Member:
    """A process that answers what it is told, until it is killed."""

    def __init__(self, name: str, *settings: Any) -> None:
        self.name = name
        context = get_context("fork")
        self.pipe, other = context.Pipe()
        target = learner if name == LEARNER else receiver
        self.process = context.Process(target=target, args=(other, *settings), daemon=True)
        self.process.start()
        other.close()

    def tell(self, *words: Any) -> None:
        self.pipe.send(words)

    def answer(self) -> Any:
        """None of one that was killed, and the text of an error."""
        try:
            assert self.pipe.poll(BOUND_S), f"{self.name} hangs"
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            assert self.process.exitcode == -signal.SIGKILL
            return None


def syncs(num_syncs: int, backend: str, seed: int, changes_alone: bool = True) -> dict[str, int]:
    """How often somebody was killed in each phase; every version is compared on every receiver.

    With `changes_alone` what has changed travels, else all weights; a receiver loads these as they
    come.
    """
    choose = random.Random(seed)
    phases = PHASES if changes_alone else PHASES_OF_WHOLE_WEIGHTS
    members = {name: Member(name, backend, changes_alone) for name in phases}
    kills: Counter[str] = Counter()
    is_open = False
    for version in range(1, num_syncs + 1):
        victim = choose.choice(sorted(phases)) if choose.random() < KILLS_A_SYNC else ""
        phase = choose.choice(phases[victim]) if victim else ""
        while True:
            is_open = is_open or opened(members)
            digests = sent(members, version, {victim: phase}, changes_alone=changes_alone)
            killed = [name for name, member in members.items() if not member.process.is_alive()]
            assert killed == ([victim] if victim else [])
            if not killed:
                break
            kills[phase] += 1
            members[victim] = Member(victim, backend, changes_alone)
            victim, is_open = "", False
        assert set(digests) == {members_digest(members[LEARNER], version)}, (version, digests)
    for member in members.values():
        member.process.kill()
    return dict(kills)


def opened(members: dict[str, Member]) -> bool:
    members[LEARNER].tell("open", len(RECEIVERS))
    info = members[LEARNER].answer()
    for index, name in enumerate(RECEIVERS):
        members[name].tell("open", info, index)
    assert [members[name].answer() for name in members] == ["joined"] * len(members)
    members[LEARNER].info = info  # type: ignore[attr-defined]
    return True


def sent(
    members: dict[str, Member], version: int, dies: dict[str, str], *, changes_alone: bool
) -> list[str]:
    """The digests of what receivers hold then: all of this version; or, where somebody dies and
    `changes_alone` travel, of one version each. (Whole weights that came in part are loaded, and
    are of no use.)
    """
    for name, member in members.items():
        member.tell("send" if name == LEARNER else "stage", version, dies.get(name, ""))
    waiting = {member.pipe: member for member in members.values()}
    answers: dict[str, Any] = {}
    while waiting:
        ready = wait(list(waiting), BOUND_S)
        assert ready, f"{[member.name for member in waiting.values()]} know of no loss"
        for pipe in ready:
            member = waiting.pop(cast(Connection, pipe))
            answers[member.name] = member.answer()
            if answers[member.name] is None and member.name != LEARNER:
                abandon(members[LEARNER].info, "a receiver died")  # type: ignore[attr-defined]
    has_come = set(answers.values()) == {"done"}
    alive = [members[name] for name in RECEIVERS if answers[name] is not None]
    for member in alive:
        member.tell("apply" if has_come else "digest", version, dies.get(member.name, ""))
    digests = [member.answer() for member in alive]
    if not has_come and changes_alone:
        before = (
            members_digest(members[LEARNER], version - 1)
            if members[LEARNER].process.is_alive()
            else None
        )
        assert before is None or {*digests} <= {before, ""}, "what was not applied changed nothing"
    return digests


def members_digest(member: Member, version: int) -> str:
    member.tell("digest", version, "")
    return str(member.answer())


def serve(pipe: Connection, calls: dict[str, Callable[..., Any]]) -> None:
    while True:
        what, *words = pipe.recv()
        try:
            pipe.send(calls[what](*words))
        except RunError as error:
            pipe.send(str(error))


def dying(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """`function`, whose process dies in its call of that number."""
    calls: list[None] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return called


def learner(pipe: Connection, backend: str, changes_alone: bool) -> None:
    os.environ |= {"MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = tiny_config("llama", SIZES["tiny"], vocab_size=300, tie=False)
    model = unsharded(config, dtype="float32")
    sender = WeightSender(
        model,
        TensorNames(config),
        backend=backend,
        dtype=torch.bfloat16,
        bucket_bytes=50_000,
        timeout_s=PATIENCE_S,
        changes_alone=changes_alone,
    )
    assert len(sender.manifest.buckets) > 4

    def open_channel(num_receivers: int) -> str:
        pipe.send(sender.open(num_receivers))
        sender.join()
        return "joined"

    def send(version: int, dies_in: str) -> str:
        become(version)
        if dies_in == "compare":
            sender._sent_parts._encode_message = dying(sender._sent_parts._encode_message, 3)  # type: ignore[union-attr, method-assign]
        elif dies_in == "send":
            sender._outgoing.put = dying(sender._outgoing.put, 3)  # type: ignore[union-attr, method-assign]
        sender.send(version)
        return "done"

    @torch.no_grad()
    def become(version: int) -> None:
        """The weights of a version are nobody's but its own, and few of them are not those of the
        one before.
        """
        for name, parameter in model.named_parameters():
            parameter.copy_(noise(name, 0, parameter.shape))
            for each in (version - 1, version):
                is_changed = noise(name, -each, parameter.shape).abs() < CHANGED
                parameter.copy_(
                    torch.where(is_changed, noise(name, each, parameter.shape), parameter)
                )

    def digest(version: int, _: str) -> str:
        become(version)
        held = sender._shards
        assert held is not None
        return digest_of({hf: held[name].local.bfloat16() for hf, name in sender._names.items()})

    serve(pipe, {"open": open_channel, "send": send, "digest": digest})


def noise(name: str, version: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {version}".encode()))
    )


def receiver(pipe: Connection, backend: str, changes_alone: bool) -> None:
    ends: list[IncomingWeights] = []
    held: dict[str, torch.Tensor] = {}

    def open_channel(info: dict[str, Any], index: int) -> str:
        for old in ends:
            old.close()
        ends[:] = [IncomingWeights(info, index=index, device=torch.device("cpu"))]
        return "joined"

    def stage(version: int, dies_in: str) -> str:
        if dies_in == "between versions":
            os.kill(os.getpid(), signal.SIGKILL)
        (incoming,) = ends
        try:
            if not changes_alone:
                load_as_they_come(incoming, dies_in)
                return "done"
            if dies_in == "stage":
                incoming._mirror.apply_message = dying(incoming._mirror.apply_message, 3)  # type: ignore[union-attr, method-assign]
            incoming.stage(version)
        except RunError as error:
            incoming.fail(error)
            raise
        return "done"

    def load_as_they_come(incoming: IncomingWeights, dies_in: str) -> None:
        if dies_in == "stage":
            incoming._incoming.take = dying(incoming._incoming.take, 3)  # type: ignore[method-assign]
        load = dying(held.__setitem__, 3) if dies_in == "apply" else held.__setitem__
        for weights in incoming.buckets():
            for name, tensor in weights:
                load(name, tensor.clone())

    def apply(version: int, dies_in: str) -> str:
        if changes_alone:
            load_as_they_come(ends[0], dies_in)
        return digest_of(held)

    serve(
        pipe,
        {
            "open": open_channel,
            "stage": stage,
            "apply": apply,
            "digest": lambda *_: digest_of(held),
        },
    )


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """Of the bits of all tensors; nothing, of none."""
    whole = xxhash.xxh3_64()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest() if tensors else ""
