"""Times of the parts of a step, and how much of a GPU's arithmetic it uses."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.models.build import build_model
from open_instruct.training.measure import speed
from open_instruct.training.measure.speed import (
    LEAST_TOKENS,
    ComputeTimer,
    StepClock,
    count_step_flops,
    find_peak_flops,
)

GPU = torch.device("cuda", 0)


class HostClock:
    """Stands for `time`."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    clock = HostClock()
    monkeypatch.setattr(speed, "time", clock)
    return clock


def test_parts_add_up_and_are_read_once(host_clock: HostClock) -> None:
    clock = StepClock(torch.device("cpu"))
    for part in ("forward", "backward", "forward"):
        with clock.timing(part):
            host_clock.wait(0.25)
    assert clock.read() == {"time/forward": 0.5, "time/backward": 0.25}
    assert clock.read() == {}


def test_pace_of_a_rank_is_that_of_its_head(host_clock: HostClock) -> None:
    """Also where hooks before and behind it wait for others."""

    class Head(torch.nn.Module):
        def forward(
            self, hidden_BTD: torch.Tensor, logits_to_keep: torch.Tensor | None = None
        ) -> torch.Tensor:
            host_clock.wait(0.02)
            return hidden_BTD

    head = Head()
    head.register_forward_pre_hook(lambda *_: host_clock.wait(0.1), prepend=True)
    pace = ComputeTimer(head, torch.device("cpu"))
    head.register_forward_hook(lambda *_: host_clock.wait(0.1))
    assert pace.read() is None
    head(torch.zeros(1, 400, 2))
    assert pace.read() == pytest.approx(0.00005)
    head(torch.zeros(1, 800, 2), logits_to_keep=torch.zeros(1, 400))
    head(torch.zeros(1, LEAST_TOKENS - 1, 2))  # takes as long
    assert pace.read() == pytest.approx(0.00005)
    assert pace.read() is None
    head(torch.zeros(1, LEAST_TOKENS - 1, 2))
    assert pace.read() is None


class Event:
    """Of a device that is done with its first `num_done` events; one comes 500 ms after the
    other.
    """

    num_recorded = num_done = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.num_recorded += 1
        self.number = Event.num_recorded

    def query(self) -> bool:
        return self.number <= Event.num_done

    def elapsed_time(self, other: Any) -> float:
        return 500.0 * (other.number - self.number)


def test_device_that_is_not_done_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(GPU)
    for part in ("forward", "backward", "optimizer"):
        with clock.timing(part):
            pass
    Event.num_done = 4
    assert clock.read() == {"time/forward": 0.5, "time/backward": 0.5}
    Event.num_done = 6
    assert clock.read() == {"time/optimizer": 0.5}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A6000", None),
    ],
)
def test_only_a_known_gpu_has_a_peak(
    monkeypatch: pytest.MonkeyPatch, name: str, tflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_flops(GPU) == (None if tflops is None else tflops * 1e12)
    assert find_peak_flops(torch.device("cpu")) is None


def test_flops_are_six_a_weight_and_those_of_attention() -> None:
    width, num_layers = SIZES["tiny"]["hidden_size"], SIZES["tiny"]["num_hidden_layers"]
    model = build_model(tiny_config("llama", SIZES["tiny"], vocab_size=512, tie=False))
    of_blocks = sum(each.numel() for each in model.blocks.parameters())
    of_head = sum(each.numel() for each in model.lm_head.parameters())

    def flops(tokens: int, labels: int, mean_length: int) -> int:
        return count_step_flops(
            model, {"tokens": tokens, "labels": labels, "rows": 1}, mean_length=mean_length
        )

    assert flops(1000, 300, 1) == pytest.approx(6 * (1000 * of_blocks + 300 * of_head), rel=0.01)
    # Two products of a query with the keys up to its own, forward and twice backward: 12 a layer,
    # width and key.
    of_attention = flops(1000, 300, 64) - flops(1000, 300, 1)
    assert of_attention == pytest.approx(12 * num_layers * width * (65 / 2 - 1) * 1000, rel=0.02)

    model.requires_grad_(False)
    assert flops(1000, 300, 1) == pytest.approx(4 * (1000 * of_blocks + 300 * of_head), rel=0.01)


@pytest.mark.slow
def test_peak_memory_of_a_run_leaves_out_what_its_launcher_holds() -> None:
    """A program takes over `ru_maxrss` of the process that starts it."""
    measure = (
        "import torch; from open_instruct.training.measure.speed import measure_peak_memory as m;"
        "print(m(torch.device('cpu'))['peak_memory_gib'])"
    )
    launch = (
        "import subprocess, sys; held = bytearray(2 * 2**30); held[::4096] = b'x' * 2**19;"
        "print(subprocess.check_output([sys.executable, '-c', sys.argv[1]], text=True))"
    )
    peak_gib = float(subprocess.check_output([sys.executable, "-c", launch, measure], text=True))
    assert 0.2 < peak_gib < 1.5
