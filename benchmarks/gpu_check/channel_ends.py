"""One process at either end of a weight channel: python -m gpu_check.channel_ends learner|RECEIVER
FOLDER [--rehearse]

Learners are two shards under torchrun; RECEIVER is the number of a process that holds weights of an
engine, without the engine. The first learner leaves what receivers connect by, and checksums; each
receiver leaves those of what came.
"""

import argparse
import json
import pickle
import time
from pathlib import Path

import torch

from gpu_check.checks.handing_over import checksum
from gpu_check.devices import device_of
from open_instruct.weight_sync.transports import choose_transport

NUM_RECEIVERS = 3
"""An engine of one device, and one of two."""
NUM_VERSIONS = 3
TIMEOUT_S, TIMEOUT_OF_REHEARSAL_S = 20.0, 120.0
"""Within the limit of the check, so that who is missing is named."""
MIB = 2**20


def send(folder: Path, *, rehearse: bool) -> None:
    """Every version is the one before, doubled."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from open_instruct.commands.tiny_model import SIZES, tiny_config
    from open_instruct.models.build import build_model
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.parallel.process import start_process, stop_process
    from open_instruct.weight_sync.sender import WeightSender

    backend = choose_transport(
        "gloo" if rehearse else "nccl", on_cuda=not rehearse, single_device=False, same_host=True
    )
    size, bucket_mib = ("tiny", 1) if rehearse else ("base", 256)
    process = start_process(timeout_s=60, seed=0)
    hf_config = tiny_config("olmo2", SIZES[size], vocab_size=SIZES[size]["vocab_size"], tie=False)
    model, names = build_model(hf_config), TensorNames(hf_config)
    model.to_empty(device=process.device)
    with torch.no_grad():
        for parameter in model.parameters():  # the same on both, of which each keeps its part
            parameter.uniform_(-1, 1)
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    sender = WeightSender(
        model,
        names,
        backend=backend,
        dtype=torch.bfloat16,
        bucket_bytes=bucket_mib * MIB,
        timeout_s=TIMEOUT_OF_REHEARSAL_S if rehearse else TIMEOUT_S,
    )
    info = sender.open(NUM_RECEIVERS)
    if process.rank == 0:
        leave(folder / "info.pickle", pickle.dumps(info))
    sender.join()
    parameters = dict(model.named_parameters())
    sums, seconds = [], []
    for version in range(NUM_VERSIONS):
        wholes = {hf_name: whole(parameters[name], DTensor) for name, hf_name in names}
        sums.append({name: checksum(tensor.to(torch.bfloat16)) for name, tensor in wholes.items()})
        del wholes
        dist.barrier()
        began_s = time.perf_counter()
        sender.send(version)
        seconds.append(time.perf_counter() - began_s)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(2)
    if process.rank == 0:
        sent = {
            "sums": sums,
            "seconds": seconds,
            "bytes": sender.manifest.num_bytes,
            "backend": backend,
        }
        leave(folder / "sent.json", json.dumps(sent).encode())
    sender.close()
    stop_process()


def whole(parameter: torch.Tensor, sharded: type) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, sharded) else parameter


def receive(folder: Path, *, index: int, rehearse: bool) -> None:
    from open_instruct.weight_sync.receiver import IncomingWeights

    while not (folder / "info.pickle").exists():
        time.sleep(0.05)
    info = pickle.loads((folder / "info.pickle").read_bytes())
    incoming = IncomingWeights(info, index=index, device=device_of(rehearse))
    found = [
        {name: checksum(tensor) for weights in incoming.buckets() for name, tensor in weights}
        for _ in range(NUM_VERSIONS)
    ]
    leave(folder / f"received{index}.json", json.dumps(found).encode())
    incoming.close()


def leave(path: Path, content: bytes) -> None:
    """Nobody finds it half written."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("end")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if args.end == "learner":
        send(args.folder, rehearse=args.rehearse)
    else:
        receive(args.folder, index=int(args.end), rehearse=args.rehearse)


if __name__ == "__main__":
    main()
