"""The loop: a step's time has all of its work in it, though a device does some when nobody waits;
when it saves.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.checkpoints import resume as resume_module
from open_instruct.checkpoints.background import in_background
from open_instruct.checkpoints.step_folder import MANIFEST, find_checkpoints, step_of
from open_instruct.run.cadence import Cadence
from open_instruct.run.run_directory import RunDirectory
from open_instruct.training import loop as loop_module
from open_instruct.training.best_step_watch import BestStepWatch
from open_instruct.training.grpo import GRPOLearner
from open_instruct.training.loop import Loop

NO_LOADER: Any = None
NUM_TOKENS = 1000
HOST_S, OPTIMIZER_S, SAVE_S = 2.0, 3.0, 100.0


class Device:
    """A clock, and what the device has still to do: that passes when it is waited for."""

    now_s = 0.0
    to_do_s = 0.0

    def wait(self, *args: Any, **kwargs: Any) -> None:
        self.now_s += self.to_do_s
        self.to_do_s = 0.0


class FakeLoop(Loop):
    """A loop whose steps and checkpoints pass time on a fake device; a checkpoint is an empty
    folder.
    """

    step = 0

    def __init__(
        self, device: Device, folder: Path, cadence: Cadence, *, keep_last_n: int = 0
    ) -> None:
        self.device = device
        self.folder = folder
        self.cadence = cadence
        self.keep_last_n = keep_last_n
        self.saved: list[int] = []
        self._peak_flops = None
        self._removal = in_background(lambda: None)

    def take_step(self, updates: Any, *, num_tokens: int) -> dict[str, float]:
        self.step += 1
        self.device.wait()
        self.device.now_s += HOST_S
        self.device.to_do_s += OPTIMIZER_S
        return {}

    def wait_for_device(self) -> None:
        self.device.wait()

    def save(self, *, waits: bool = True, best_step: int | None = None) -> None:
        self.best_step = best_step
        self.device.wait()
        self.device.now_s += SAVE_S
        (self.folder / f"step{self.step}").mkdir()
        (self.folder / f"step{self.step}" / MANIFEST).write_text("{}")
        self.saved.append(self.step)
        self._remove_old()

    def close(self) -> None:
        pass

    def _updates(self, loader: Any) -> Iterator[Any]:
        while True:
            yield SimpleNamespace(counts={"tokens": NUM_TOKENS}, microbatches=())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: device.now_s))
    monkeypatch.setattr(loop_module, "gather_objects", lambda value: [value])
    # Of the signals, over gloo.
    monkeypatch.setattr(loop_module.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(resume_module, "barrier", lambda: None)
    monkeypatch.setattr(resume_module, "get_rank", lambda: 0)
    return device


@pytest.mark.parametrize("save_every", [1, 2, 4])
def test_optimizer_counts_and_a_checkpoint_does_not(
    device: Device, tmp_path: Path, save_every: int
) -> None:
    """The optimizer's kernels run on when the step returns; the next one waits for them, or a
    checkpoint does.
    """
    speeds: list[float] = []
    loop = FakeLoop(device, tmp_path, Cadence(num_steps=4, save_every=save_every))
    loop.fit(NO_LOADER, on_step=lambda step, row: speeds.append(row["tokens_per_second"]))
    assert sum(NUM_TOKENS / speed for speed in speeds) == pytest.approx(4 * (HOST_S + OPTIMIZER_S))


@pytest.mark.parametrize(
    ("keep_last_n", "ephemeral", "left"),
    [(0, 2, [3, 6, 9, 10]), (2, 2, [6, 9, 10]), (2, None, [9, 10]), (0, None, [3, 6, 9, 10])],
)
def test_checkpoints_that_last_and_those_that_do_not(
    device: Device, tmp_path: Path, keep_last_n: int, ephemeral: int | None, left: list[int]
) -> None:
    """Each of every 3 steps stays, that of every 2 until there is a newer one, and the last."""
    cadence = Cadence(num_steps=10, save_every=3, save_ephemeral_every=ephemeral)
    loop = FakeLoop(device, tmp_path, cadence, keep_last_n=keep_last_n)
    loop.fit(NO_LOADER, on_step=lambda step, row: None)
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == left
    assert loop.saved == [step for step in range(1, 11) if cadence.saves_after(step)]


def test_best_steps_are_saved_and_stay_until_there_is_a_better_one(
    device: Device, tmp_path: Path
) -> None:
    losses = {2: 5.0, 4: 3.0, 6: 4.0, 8: 2.0, 10: 6.0}

    class Scored(FakeLoop):
        def take_step(self, updates: Any, *, num_tokens: int) -> dict[str, float]:
            return super().take_step(updates, num_tokens=num_tokens) | {
                "eval/loss": losses.get(self.step, math.nan)
            }

    loop = Scored(
        device, tmp_path, Cadence(num_steps=10, save_every=5, saves_best=True), keep_last_n=1
    )
    left: list[list[int]] = []
    watch = BestStepWatch("eval/loss", RunDirectory(path=tmp_path), until=0)
    loop.fit(
        NO_LOADER,
        best=watch,
        on_step=lambda step, row: left.append(list(map(step_of, find_checkpoints(tmp_path)))),
    )
    assert loop.saved == [2, 4, 5, 8, 10]
    assert left[4:] == [[4], [4, 5], [4, 5], [4, 5], [5, 8], [5, 8]]
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [8, 10]


def test_step_of_grpo_ends_with_its_optimizer() -> None:
    """What is next, the weights' way to the engines, would wait for it, and take its time for its
    own.
    """
    device = Device()

    def take_step(updates: Any, *, num_tokens: int, before: Any) -> dict[str, float]:
        device.to_do_s += OPTIMIZER_S
        return {"loss": 1.0}

    learner = SimpleNamespace(
        config=SimpleNamespace(
            loss=SimpleNamespace(num_epochs=1), critic=SimpleNamespace(critic_warmup_steps=0)
        ),
        critic=None,
        policy=SimpleNamespace(add_frozen_logprobs=lambda updates, num_epochs: ()),
        run=SimpleNamespace(layout=SimpleNamespace(model_parallel_degree=1)),
        loop=SimpleNamespace(step=0, take_step=take_step, wait_for_device=device.wait),
    )
    work = SimpleNamespace(minibatches=(), num_tokens_global=0, prefix_sharing=False, num_routes=0)
    assert GRPOLearner.step(learner, work) == {"loss": 1.0}  # type: ignore[arg-type]
    assert (device.now_s, device.to_do_s) == (OPTIMIZER_S, 0.0)
