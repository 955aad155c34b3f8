"""Runs on DeepSpeed that manages gradient accumulation, alone or under a stand-in of DeepCompile's
kernels.

The stand-in is told what the extension is told, and reduces gradients as `z1.cpp`, `z2.cpp` and
`z3.cpp` do, when autograd has made them: everything runs but compiled passes.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from open_instruct.training.deepspeed import zero
from open_instruct.training.deepspeed.deepcompile import list_units
from open_instruct.training.deepspeed.library import deepspeed
from tests.ranks.jobs import deepspeed_runs
from tests.ranks.jobs.deepspeed_runs import as_for_large_models

CALLS: list[str] = []
"""What the extension was told, and what was compiled, in order."""


def run(runs: list[dict[str, Any]], ports: list[int]) -> list[Any]:
    """As those of `deepspeed_runs`, `how` "managed" or "compiled"; of each, the calls."""
    found = []
    for each, port in zip(runs, ports, strict=True):
        CALLS.clear()
        how = each.pop("how")
        with HOW[how]():
            done = deepspeed_runs.one(port, persists=how == "managed", **each)
            # An engine that ended later would build the extension, to tell it so.
            gc.collect()
        assert done is None, done
        found.append([*CALLS])
    return found


@contextmanager
def plain() -> Iterator[None]:
    yield


@contextmanager
def managed() -> Iterator[None]:
    """As --deepcompile has it, and nothing compiled."""

    def settings(*sections: Any, **more: Any) -> dict[str, Any]:
        return as_for_large_models(*sections, **more) | {"managed_gradient_accumulation": True}

    with mock.patch.object(zero, "engine_settings", settings):
        yield


@contextmanager
def compiled() -> Iterator[None]:
    """With --deepcompile: DeepSpeed's own code around the passes, and a stand-in's within."""
    util, *starts = (
        importlib.import_module(f"{deepspeed.__name__}.compile.{name}")
        for name in ("util", "init_z1_and_2", "init_z3")
    )
    stand_in = StandIn()

    def compile_nothing(module: Any, **how: Any) -> None:
        assert how == {"backend": trace}
        CALLS.append("compile")
        stand_in.hook_model(module)

    with ExitStack() as held:
        held.enter_context(mock.patch.object(zero, "require_cuda"))
        held.enter_context(mock.patch.object(util, "dc_handle", stand_in))
        for hooks in ("pre_backward_hooks", "post_backward_hooks"):  # of the process
            held.enter_context(mock.patch.object(util, hooks, []))
        for module in starts:
            held.enter_context(mock.patch.object(module, "make_backend", return_value=trace))
        held.enter_context(mock.patch.object(torch.nn.Module, "compile", compile_nothing))
        held.enter_context(mock.patch.object(torch.compiler, "set_stance", stand_in.note_stance))
        yield


def trace(module: Any, inputs: Any) -> Any:
    raise AssertionError("nothing is traced here")


class StandIn:
    """The extension's functions that DeepSpeed calls from Python, without those of a graph."""

    def __init__(self) -> None:
        self.is_last = False
        self.sums: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, tuple[torch.Tensor, int]] = {}
        self.has_sum: set[int] = set()

    def init(self, group: Any, config: Any, bucket_size: int) -> None:
        CALLS.append("init")
        assert config.deepcompile and bucket_size
        self.group = group

    def reset(self) -> None:
        CALLS.append("reset")

    def cleanup(self) -> None:
        CALLS.append("cleanup")

    def register_param(
        self, number: int, shape: Any, weights: Any, buffer: torch.Tensor, offset: int
    ) -> None:
        CALLS.append("register")
        assert weights.shape == shape
        self.buffers[number] = (buffer, offset)
        is_stage_2 = bool(buffer.numel())
        weights.register_post_accumulate_grad_hook(lambda each: self._reduce(number, each))
        self.adds_after_reducing = getattr(self, "adds_after_reducing", False) or is_stage_2

    def update_param_grad_buffer(self, number: int, buffer: torch.Tensor, offset: int) -> None:
        self.buffers[number] = (buffer, offset)

    def register_z3_param(
        self, number: int, shape: Any, shard: Any, buffer: Any, persists: bool, dtype: Any
    ) -> None:
        CALLS.append("register")
        assert not persists and dtype == shard.dtype
        rank = dist.get_rank(self.group)
        self.buffers[number] = (buffer, rank * shard.numel())
        self.adds_after_reducing = True

    def hook_model(self, model: Any) -> None:
        """Look at what is gathered; stage 3 gives the extension no parameter, but its range."""
        self.sharded = [each for each in model.parameters() if hasattr(each, "ds_id")]
        for each in self.sharded:
            each.register_post_accumulate_grad_hook(lambda each: self._reduce(each.ds_id, each))
        for unit in list_units(model):
            inside = {id(each) for each in unit.parameters()}
            unit.register_forward_pre_hook(lambda *_, inside=inside: self._look_at(inside))

    def _look_at(self, inside: set[int]) -> None:
        if not torch.is_grad_enabled():
            assert self.gathered() <= inside

    def gathered(self) -> set[int]:
        return {id(each) for each in self.sharded if each.ds_status.name == "AVAILABLE"}

    @contextmanager
    def note_stance(self, stance: str) -> Iterator[None]:
        assert stance == "force_eager"
        assert not torch.is_grad_enabled()
        CALLS.append("uncompiled")
        yield
        assert not self.gathered()

    def start_backward(self, is_last: bool) -> None:
        CALLS.append("last backward" if is_last else "backward")
        if self.is_last:
            self.has_sum.clear()
        self.is_last = is_last

    def _reduce(self, number: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None  # as a compiled pass gives none
        if not self.adds_after_reducing:
            self.sums[number] = self.sums.get(number, 0) + gradient
            if self.is_last:
                self._give(number, self.sums.pop(number))
            return
        self._give(number, gradient)

    def _give(self, number: int, gradient: torch.Tensor) -> None:
        mean = gradient.detach().flatten() / dist.get_world_size(self.group)
        dist.all_reduce(mean, group=self.group)
        buffer, offset = self.buffers[number]
        part = mean[offset : offset + buffer.numel()]
        flat = buffer.flatten() if not buffer.numel() else buffer.view(-1)
        here = flat[: part.numel()]
        if self.adds_after_reducing and number in self.has_sum:
            here.add_(part)
        else:
            here.copy_(part)
        self.has_sum.add(number)


HOW = {"plain": plain, "managed": managed, "compiled": compiled}
