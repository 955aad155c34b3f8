"""Jobs in which the first ranks are learners and the others receivers, which need no process
group.
"""

import contextlib
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from open_instruct.batching.documents import pack_documents
from open_instruct.cluster.watchdog import MARK_VARIABLE, SHARED_MEMORY
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Document, Span
from open_instruct.models.export import export_hf
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import SINGLE_NAME, load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import stream_load
from open_instruct.models.lora.adapters import gather_adapter
from open_instruct.models.lora.files import find_peft_name
from open_instruct.models.shards import find_local_shards, reshard
from open_instruct.training.model.forward import token_logprobs
from open_instruct.weight_sync import broadcasts
from open_instruct.weight_sync.folder_sender import FolderSender
from open_instruct.weight_sync.progress import abandon
from open_instruct.weight_sync.receiver import IncomingWeights, WeightSource, open_incoming
from open_instruct.weight_sync.sender import WeightSender
from tests.ranks.files import tell, told
from tests.ranks.jobs.weights import in_ranges, sharded, unsharded

CPU = torch.device("cpu")
DOCUMENT = Document(
    token_ids=tuple(i % 7 + 2 for i in range(12)), responses=(Span(start=4, stop=12),)
)
LORA = LoRASection(use_lora=True, lora_r=8, lora_alpha=24)
SPREAD = 0.05  # of an adapter's values


def own_rank() -> int:
    return int(os.environ["RANK"])


def start_learner(num_learners: int) -> None:
    os.environ.update(WORLD_SIZE=str(num_learners), LOCAL_WORLD_SIZE=str(num_learners))
    dist.init_process_group("gloo")


def load(
    folder: str, layout: dict[str, Any] | str | None, *, lora: LoRASection | None = None
) -> tuple[Any, TensorNames]:
    hf_config = load_hf_config(folder)
    if isinstance(layout, dict):
        model = sharded(hf_config, **layout, lora=lora)
    else:
        model = (unsharded if layout is None else in_ranges)(hf_config, dtype="float32")
    names = TensorNames(hf_config)
    files = CheckpointFiles.open(folder)
    stream_load(model, files, names)
    return model, names


def offer(sender: WeightSender, num_receivers: int, path: Path) -> None:
    """Open a channel, and tell the receivers."""
    info = sender.open(num_receivers)
    if own_rank() == 0:
        tell(path, info)


def received(
    incoming: WeightSource, info: dict[str, Any], version: int, turns: Path
) -> dict[str, torch.Tensor]:
    if info["backend"] == "files":
        told(turns.with_name(f"{turns.stem}-sent-{version}.told"))
    if info["changes_alone"]:
        incoming.stage(version)
    weights = {name: tensor for weights in incoming.buckets() for name, tensor in weights}
    tell(turns.with_name(f"{turns.stem}-read-{version}-{own_rank()}.told"), {})
    return (
        {name: tensor.clone() for name, tensor in weights.items()}
        if info["changes_alone"]
        else weights
    )


@torch.no_grad()
def sync(
    cases: list[dict[str, Any]], num_learners: int, num_receivers: int, folder: str
) -> list[list[str]]:
    """For each case, what a receiver got other than the export, or, of a second version, other than
    twice as much.
    """
    broadcasts.LARGE_BYTES = 2**12  # so that there are messages of every kind
    is_learner = own_rank() < num_learners
    if is_learner:
        start_learner(num_learners)
    differing = []
    for number, case in enumerate(cases):
        if is_learner:
            _send_twice(
                case, num_receivers, Path(folder, f"{number}.told"), out=Path(folder, str(number))
            )
            continue
        turns = Path(folder, f"{number}.told")
        info = told(turns)
        incoming = open_incoming(info, index=own_rank() - num_learners, device=CPU, previous=None)
        first, second = (received(incoming, info, version, turns) for version in (1, 2))
        files = CheckpointFiles.open(Path(folder, str(number)))
        assert set(first) == set(files)
        differing.append(
            [
                name
                for name in files
                if not torch.equal(first[name], files.read(name))
                or not torch.equal(second[name], first[name] * (1 if ".lora_A." in name else 2))
            ]
        )
    return differing


def _send_twice(case: dict[str, Any], num_receivers: int, info_path: Path, *, out: Path) -> None:
    alone = case["adapter_alone"]
    model, names = load(case["folder"], case["layout"], lora=LORA if alone else None)
    dtype = getattr(torch, case["dtype"])
    if alone:
        move(model, 1)
        store_scaled(model, names, out, dtype=dtype)
    else:
        export_hf(model, names, source_folder=case["folder"], out_folder=out, dtype=dtype)
    if case["layout"] != "ranges" and not case["changes_alone"]:
        # Leaves FSDP's root module gathered.
        token_logprobs(model, pack_documents([DOCUMENT]), device=CPU)
    sender = sender_of(case["backend"], out.with_suffix(".weights"))(
        model,
        names,
        backend=case["backend"],
        dtype=dtype,
        bucket_bytes=case["bucket_bytes"],
        timeout_s=30,
        adapter_alone=alone,
        changes_alone=case["changes_alone"],
    )
    sent = find_local_shards(model, adapters_only=alone)
    assert len(sender.manifest.buckets) >= case["min_buckets"]
    assert any(bucket.num_pieces > 1 for bucket in sender.manifest.buckets)
    assert sender.manifest.largest_bucket_bytes < 1.1 * case["bucket_bytes"]
    assert (
        sender.manifest.num_bytes
        == sum(math.prod(held.shape) for held in sent.values()) * dtype.itemsize
    )
    offer(sender, num_receivers, info_path)
    sender.join()

    def send(version: int) -> None:
        sender.send(version)
        if case["backend"] == "files":  # as the driver does: engines are told, and waited for
            if own_rank() == 0:
                tell(info_path.with_name(f"{info_path.stem}-sent-{version}.told"), {})
            for receiver in range(num_receivers):
                told(
                    info_path.with_name(
                        f"{info_path.stem}-read-{version}-{dist.get_world_size() + receiver}.told"
                    )
                )

    send(1)
    if case["layout"] == "ranges":
        for held in sent.values():
            held.local.mul_(2)
    # Shards are found anew: FSDP may replace them at the first forward pass, and whoever loads a
    # checkpoint.
    else:
        token_logprobs(model, pack_documents([DOCUMENT]), device=CPU)
        reshard(model)
        # Of what an adapter adds, and so of its second matrix, where it is alone.
        state = get_model_state_dict(model)
        factors = {name: 2 if name.endswith(".lora_B") or not alone else 1 for name in state}
        set_model_state_dict(model, {name: value * factors[name] for name, value in state.items()})
        token_logprobs(model, pack_documents([DOCUMENT]), device=CPU)
    send(2)
    sender.close()


def sender_of(backend: str, folder: Path) -> Callable[..., WeightSender]:
    if backend != "files":
        return WeightSender
    folder.mkdir(exist_ok=True)
    return partial(FolderSender, folder=folder)


def store_scaled(model: Any, names: TensorNames, out: Path, *, dtype: torch.dtype) -> None:
    """The adapters as an engine takes them, whose own factor is 1."""
    scale = {"lora_A": 1.0, "lora_B": LORA.scale}
    tensors = {
        find_peft_name(name, names): (whole * scale[name.rpartition(".")[2]]).to(dtype).clone()
        for name, whole in gather_adapter(model)
    }
    if dist.get_rank() == 0:
        out.mkdir()
        save_file(tensors, out / SINGLE_NAME)


class OutOfOrder(RuntimeError):
    """What a learner fails with in the middle of a version."""


def move(model: Any, version: int) -> None:
    """Give the adapters the values that they have in a version: of 0 they add nothing."""
    reshard(model)
    for name, held in find_local_shards(model, adapters_only=True).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {version}".encode()))
        held.local.copy_(
            torch.randn(held.shape, generator=generator)[held.box] * SPREAD * bool(version)
        )


@torch.no_grad()
def feed_engine(
    folder: str,
    source: str,
    layout: dict[str, Any],
    backend: str,
    adapter_alone: bool,
    changes_alone: bool,
    num_versions: int,
) -> list[tuple[int, float, float]]:
    """One version that breaks after its third bucket, then whole ones. Of each that has tokens, how
    far the engine's log-probs of them are from the learners' at that version, and at the one before
    it.
    """
    start_learner(int(os.environ["WORLD_SIZE"]))
    model, names = load(source, layout, lora=LORA)
    sender = sender_of(backend, Path(folder, "weights"))(
        model,
        names,
        backend=backend,
        dtype=torch.float32,
        bucket_bytes=10_000 if adapter_alone else 100_000,
        timeout_s=300,  # an engine loads its libraries first
        adapter_alone=adapter_alone,
        changes_alone=changes_alone,
    )
    move(model, 1)
    offer(sender, 1, Path(folder, "0.told"))
    sender.join()
    # Its own, or the other learner's.
    with breaking(sender), contextlib.suppress(OutOfOrder, RunError):
        sender.send(1)
    offer(sender, 1, Path(folder, "1.told"))
    sender.join()
    for version in range(1, num_versions + 1):
        move(model, version)
        sender.send(version)
        if backend == "files":
            tell(Path(folder, f"sent-{version}-{own_rank()}.told"), {})
            told(Path(folder, f"read-{version}.told"))
    sender.close()
    completions: list[tuple[tuple[int, ...], Completion]] = told(Path(folder, "completions.told"))[
        "completions"
    ]
    # Of the learners' version, from the tokens of a version.
    farthest: dict[tuple[int, int], float] = {}
    for version in range(num_versions + 1):
        move(model, version)
        both_versions = {version, version + 1}
        near = [(prompt, it) for prompt, it in completions if both_versions & set(it.versions)]
        made_by = torch.tensor([maker for _, it in near for maker in it.versions])
        engines = torch.tensor([logprob for _, it in near for logprob in it.logprobs])
        ours = token_logprobs(
            model, pack_documents([document_of(*both) for both in near]), device=CPU
        ).logprobs_N
        for maker in both_versions & set(made_by.tolist()):
            farthest[version, maker] = float((ours - engines).abs()[made_by == maker].max())
    return [
        (version, farthest[version, version], farthest[max(version - 1, 0), version])
        for version in sorted({maker for _, maker in farthest})
    ]


@contextlib.contextmanager
def breaking(sender: WeightSender) -> Iterator[None]:
    """A sender that fails in the middle of a version."""
    is_folder = isinstance(sender, FolderSender)
    owner, name = (sender, "_add_link") if is_folder else (sender._outgoing, "put")
    whole = getattr(owner, name)

    def fail(first: Any, *args: Any) -> None:
        if is_folder or first == 3:
            raise OutOfOrder
        whole(first, *args)

    setattr(owner, name, fail)
    yield
    setattr(owner, name, whole)


def document_of(prompt: tuple[int, ...], completion: Completion) -> Document:
    whole = (*prompt, *completion.token_ids)
    return Document(token_ids=whole, responses=(Span(start=len(prompt), stop=len(whole)),))


def go_missing(
    folder: str, source: str, layout: dict[str, Any], backend: str, missing_at: str
) -> str:
    """Ranks 0 and 1 are learners, 2 and 3 receivers; receiver 1 stops at `missing_at`.

    Each rank's complaint.
    """
    rank, path = own_rank(), Path(folder, f"{backend}-{missing_at}.told")
    try:
        if rank < 2:
            start_learner(2)
            model, names = load(source, layout)
            timeout_s = 30.0 if missing_at == "abandoned" else 2.0
            sender = WeightSender(
                model,
                names,
                backend=backend,
                dtype=torch.float32,
                bucket_bytes=100_000,
                timeout_s=timeout_s,
            )
            offer(sender, 2, path)
            assert backend != "shm" or own_files()
            try:
                sender.join()
            finally:
                dist.barrier()
                assert not own_files(), "nothing stays in shared memory"
            sender.send(7)
            return "sent"
        info = told(path)
        if rank == 3 and missing_at == "join":
            return "missing"
        if rank == 3 and missing_at == "connect":
            broadcasts.broadcast_group = frozen  # type: ignore[assignment]
        incoming = IncomingWeights(info, index=rank - 2, device=CPU)
        if rank == 3 and missing_at == "begin":
            time.sleep(4)
            return "missing"
        for number, _ in enumerate(incoming.buckets()):
            if rank == 3 and number == 2:
                if missing_at == "abandoned":
                    abandon(info, "engine 1 died")
                time.sleep(4)
                return "missing"
        return "received"
    except RunError as error:
        time.sleep(1)  # the others ask learner 0 why
        return str(error)


def frozen(*args: Any, **kwargs: Any) -> None:
    """In the place of what a receiver does next."""
    time.sleep(4)
    raise RunError("missing")


def own_files() -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"{os.environ[MARK_VARIABLE]}*")]
