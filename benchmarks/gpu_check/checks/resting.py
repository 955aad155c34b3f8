"""A learner's state to host memory and back, as before and after an engine's turn, without vLLM."""

from pathlib import Path

import torch

from gpu_check.devices import GIB, device_of
from gpu_check.findings import Findings
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.models.build import build_model
from open_instruct.models.storages import list_module_tensors, list_nested_tensors
from open_instruct.training.state_mover import StateMover

NUM_ROUNDS = 3
MOST_LEFT = 0.02
"""Of the state, on the device while it is on the host: sines and cosines, and workspaces."""


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    del work
    device = device_of(rehearse)
    size = SIZES["tiny" if rehearse else "base"]
    hf_config = tiny_config("olmo2", size, vocab_size=size["vocab_size"], tie=False)
    model = build_model(hf_config)
    model.init_weights(device=device, max_seq_len=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def list_tensors() -> list[torch.Tensor]:
        states = [*optimizer.state.values()]
        return [*list_module_tensors(model), *list_nested_tensors(states)]

    mover = StateMover(list_tensors, device)
    copies_begin_bytes = count_bytes(device)
    copies = [tensor.detach().clone() for tensor in list_tensors()]
    copies_bytes = count_bytes(device) - copies_begin_bytes
    rows: list[dict[str, object]] = []
    for number in range(NUM_ROUNDS):
        leaving = mover.move_to_host()
        left_bytes = count_bytes(device) - copies_bytes
        coming = mover.move_to_device()
        pairs = zip(list_tensors(), copies, strict=True)
        is_same = all(has_same_bits(tensor, copy) for tensor, copy in pairs)
        findings.require(is_same, f"round {number + 1}: other bits came back")
        findings.require(
            left_bytes <= MOST_LEFT * leaving.num_bytes,
            f"round {number + 1}: {left_bytes / GIB:.2f} GiB stayed on the device",
        )
        rows.append(
            {
                "round": number + 1,
                "GiB": leaving.num_bytes / GIB,
                "GiB left": left_bytes / GIB,
                "to the host, GB/s": leaving.num_bytes / leaving.seconds / 1e9,
                "back, GB/s": coming.num_bytes / coming.seconds / 1e9,
            }
        )
    findings.table("State of a learner to host memory and back", rows)
    last = rows[-1]
    findings.headline = (
        f"{last['to the host, GB/s']:.0f} GB/s to the host, {last['back, GB/s']:.0f} GB/s back, "
        "bit for bit"
    )


def count_bytes(device: torch.device) -> int:
    """Bytes of all tensors on a GPU; 0 without one."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def has_same_bits(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if tensor.device.type == "meta":
        return True
    return torch.equal(flat_bytes(tensor), flat_bytes(copy))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
