"""The loop: a step's time has all of its work in it, though a device does some when nobody waits; when it saves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from open_instruct.checkpoints import resume as resume_module
from open_instruct.checkpoints.background import at_once
from open_instruct.checkpoints.step_folder import MANIFEST, find_checkpoints, step_of
from open_instruct.learner import loop as loop_module
from open_instruct.learner.grpo import GRPOLearner
from open_instruct.learner.loop import Loop

NUM_TOKENS, NUM_STEPS = 1000, 4
HOST_S, OPTIMIZER_S, SAVE_S = 2.0, 3.0, 100.0


class Device:
    """A clock, and what the device has still to do: that passes when it is waited for."""

    now_s = 0.0
    to_do_s = 0.0

    def wait(self, *args: Any, **kwargs: Any) -> None:
        self.now_s += self.to_do_s
        self.to_do_s = 0.0


@pytest.mark.parametrize("save_interval", [1, 2, 4])
def test_the_optimizer_counts_and_a_checkpoint_does_not(monkeypatch: pytest.MonkeyPatch, save_interval: int) -> None:
    """The optimizer's kernels run on when the step returns; the next one waits for them, or a checkpoint does."""
    device = Device()
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: device.now_s))
    monkeypatch.setattr(loop_module.dist, "all_reduce", lambda *_, **__: None)  # of the signals, over gloo

    class FakeLoop(Loop):
        step = 0

        def __init__(self) -> None:
            self.learner = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
            self.num_steps = NUM_STEPS
            self._peak_flops = None
            self.save_intervals = [save_interval]

        def take_step(self, updates: Any, *, num_tokens: int) -> dict[str, float]:
            self.step += 1
            device.wait()
            device.now_s += HOST_S
            device.to_do_s += OPTIMIZER_S
            return {}

        def wait_for_device(self) -> None:
            device.wait()

        def save(self, *, waits: bool = True) -> None:
            device.wait()
            device.now_s += SAVE_S

        def close(self) -> None:
            pass

        def _updates(self, loader: Any) -> Iterator[Any]:
            while True:
                yield SimpleNamespace(counts={"tokens": NUM_TOKENS}, microbatches=())

    speeds: list[float] = []
    FakeLoop().fit(None, on_step=lambda step, row: speeds.append(row["tokens_per_second"]))  # type: ignore[arg-type]
    assert len(speeds) == NUM_STEPS
    assert sum(NUM_TOKENS / speed for speed in speeds) == pytest.approx(NUM_STEPS * (HOST_S + OPTIMIZER_S))


def test_checkpoints_that_last_and_those_that_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of every 3 steps stays, that of every 2 until there is a newer one, and the last."""
    monkeypatch.setattr(resume_module, "barrier", lambda: None)
    monkeypatch.setattr(resume_module, "get_rank", lambda: 0)
    written: list[int] = []

    class FakeLoop(Loop):
        step = 0

        def __init__(self, *, keep_last_n: int, lasting_interval: int) -> None:
            self.learner = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
            self.num_steps, self._peak_flops, self.folder = 10, None, tmp_path
            self.keep_last_n, self.lasting_interval = keep_last_n, lasting_interval
            self.save_intervals = [3, 2]
            self._removal = at_once(lambda: None)

        def take_step(self, updates: Any, *, num_tokens: int) -> dict[str, float]:
            self.step += 1
            return {}

        def save(self, *, waits: bool = True) -> None:
            folder = tmp_path / f"step{self.step}"
            folder.mkdir()
            (folder / MANIFEST).write_text("{}")
            written.append(self.step)
            self._remove_old(run=at_once)

        def _first_signal(self, noted: int | None) -> int | None:
            return None

        def close(self) -> None:
            pass

        def _updates(self, loader: Any) -> Iterator[Any]:
            while True:
                yield SimpleNamespace(counts={"tokens": NUM_TOKENS}, microbatches=())

    def left(**settings: int) -> list[int]:
        loop = FakeLoop(**settings)
        loop.fit(None, on_step=lambda step, row: None)  # type: ignore[arg-type]
        steps = [step_of(path) for path in find_checkpoints(tmp_path)]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        return steps

    assert left(keep_last_n=0, lasting_interval=3) == [3, 6, 9, 10]
    assert left(keep_last_n=2, lasting_interval=3) == [6, 9, 10]
    assert left(keep_last_n=2, lasting_interval=1) == [9, 10]
    assert written == [2, 3, 4, 6, 8, 9, 10] * 3


def test_a_step_of_grpo_ends_with_its_optimizer() -> None:
    """What is next, the weights' way to the engines, would wait for it, and take its time for its own."""
    device = Device()

    def take_step(updates: Any, *, num_tokens: int) -> dict[str, float]:
        device.to_do_s += OPTIMIZER_S
        return {"loss": 1.0}

    learner = SimpleNamespace(
        config=SimpleNamespace(loss=SimpleNamespace(num_epochs=1)),
        policy=SimpleNamespace(with_frozen_logprobs=lambda updates, num_epochs: ()),
        pretrained=SimpleNamespace(pad_token_id=0),
        run=SimpleNamespace(layout=SimpleNamespace(model_parallel_degree=1)),
        loop=SimpleNamespace(take_step=take_step, wait_for_device=device.wait),
    )
    work = SimpleNamespace(minibatches=(), num_tokens_global=0)
    assert GRPOLearner.step(learner, work) == {"loss": 1.0}  # type: ignore[arg-type]
    assert (device.now_s, device.to_do_s) == (OPTIMIZER_S, 0.0)
