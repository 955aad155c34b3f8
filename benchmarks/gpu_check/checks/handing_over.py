"""Weights from a learner to a receiver in another process on the same device, without vLLM:

CUDA's shared memory.
"""

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gpu_check.devices import device_of, median_seconds
from gpu_check.findings import Findings
from open_instruct.weight_sync.transports import choose_transport

NUM_COMPARED, NUM_TIMED = 2, 3
TIMEOUT_S = 40.0
MIB = 2**20


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    del work
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, rehearse), daemon=True)
    receiver.start()
    theirs.close()
    sent, backend = send(ours, rehearse)
    received = ours.recv()
    receiver.join(TIMEOUT_S)
    if isinstance(received, str):
        raise RuntimeError(f"the receiver failed: {received}")
    wrong = [
        f"version {version}: {name}"
        for version, sums in enumerate(sent["sums"])
        for name, total in sums.items()
        if received[version].get(name) != total
    ]
    findings.require(
        not wrong, f"{len(wrong)} tensors came out otherwise than they were sent, first {wrong[:3]}"
    )
    rate = sent["bytes"] / min(sent["seconds"][NUM_COMPARED:]) / 1e9
    findings.table(
        f"A sync by {backend}, in buckets of {sent['bucket_mib']} MiB",
        [
            {"what": "tensors", "figure": len(sent["sums"][0])},
            {"what": "bytes", "figure": sent["bytes"]},
            {"what": "first sync, s", "figure": sent["seconds"][0]},
            {"what": "fastest sync, s", "figure": min(sent["seconds"][NUM_COMPARED:])},
            {"what": "GB/s", "figure": rate},
            {"what": "GB/s of a bare copy on the device", "figure": sent["copy_gb_s"]},
        ],
    )
    findings.headline = (
        f"{backend}: {len(sent['sums'][0])} tensors as they were sent, {rate:.1f} GB/s"
    )


def send(pipe: Connection, rehearse: bool) -> tuple[dict[str, Any], str]:
    """As the learner: every version is the one before, doubled."""
    import torch.distributed as dist

    from open_instruct.commands.tiny_model import SIZES, tiny_config
    from open_instruct.models.build import build_model
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.parallel.process import start_process, stop_process
    from open_instruct.weight_sync.sender import WeightSender

    device = device_of(rehearse)
    backend = choose_transport(
        "auto", on_cuda=not rehearse, single_device=not rehearse, same_host=True
    )
    size, bucket_mib = ("tiny", 1) if rehearse else ("base", 256)
    start_process(timeout_s=60, seed=0)
    assert dist.get_world_size() == 1
    hf_config = tiny_config("olmo2", SIZES[size], vocab_size=SIZES[size]["vocab_size"], tie=False)
    model, names = build_model(hf_config), TensorNames(hf_config)
    model.init_weights(device=device, max_seq_len=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    sender = WeightSender(
        model,
        names,
        backend=backend,
        dtype=torch.bfloat16,
        bucket_bytes=bucket_mib * MIB,
        timeout_s=TIMEOUT_S,
    )
    pipe.send(sender.open(1))
    sender.join()
    parameters = dict(model.named_parameters())
    sums, seconds = [], []
    for version in range(NUM_COMPARED + NUM_TIMED):
        if version < NUM_COMPARED:
            sums.append(
                {hf_name: checksum(parameters[name].to(torch.bfloat16)) for name, hf_name in names}
            )
        began_s = time.perf_counter()
        sender.send(version)
        seconds.append(time.perf_counter() - began_s)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(2)
    source = torch.empty(bucket_mib * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    sent = {
        "sums": sums,
        "seconds": seconds,
        "bytes": sender.manifest.num_bytes,
        "bucket_mib": bucket_mib,
        "copy_gb_s": source.numel() / copy_s / 1e9,
    }
    pipe.send("done")
    sender.close()
    stop_process()
    return sent, backend


def receive(pipe: Connection, rehearse: bool) -> None:
    """As an engine, without one: answers with the checksums of the versions that are compared."""
    from open_instruct.weight_sync.receiver import IncomingWeights

    try:
        device = device_of(rehearse)
        incoming = IncomingWeights(pipe.recv(), index=0, device=device)
        found = [
            {name: checksum(tensor) for weights in incoming.buckets() for name, tensor in weights}
            for _ in range(NUM_COMPARED)
        ]
        for _ in range(NUM_TIMED):
            for weights in incoming.buckets():
                for _ in weights:
                    pass
        incoming.close()
        pipe.recv()
        pipe.send(found)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def checksum(tensor: torch.Tensor) -> int:
    """Of the bits, each weighed by its place: two that changed places are told apart."""
    bits = tensor.detach().contiguous().flatten().view(torch.int16).to(torch.int64)
    return int((bits * (torch.arange(len(bits), device=bits.device) % 251 + 1)).sum())
