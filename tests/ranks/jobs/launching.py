"""Jobs that test the launcher itself."""

import os
import time

import torch
import torch.distributed as dist


def all_reduced(scale: int) -> dict[str, object]:
    dist.init_process_group("gloo")
    number = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(number)
    return {
        "sum": int(number),
        "local_rank": os.environ["LOCAL_RANK"],
        "num_nodes": os.environ["NUM_NODES"],
    }


def one_rank_raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one says no")
    time.sleep(600)


def hang() -> None:
    time.sleep(600)
