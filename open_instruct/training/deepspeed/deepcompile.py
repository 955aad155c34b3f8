"""DeepCompile: DeepSpeed compiles the passes that learn, with ZeRO's exchanges in them.

It is not for passes without gradients. They run uncompiled, and stage 3, whose hooks on modules are
gone by then, gathers the weights of one unit at a time for them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from torch import nn

from open_instruct.core.errors import InputError, RunError
from open_instruct.core.text import spell_count
from open_instruct.training.deepspeed.library import deepspeed


def require_cuda(device: torch.device) -> None:
    """Refuse --deepcompile on a CPU.

    :raises InputError: the device is none of CUDA's.
    """
    if device.type != "cuda":
        raise InputError(
            "--deepcompile needs CUDA: the exchanges that DeepSpeed compiles into the passes are "
            "NCCL's, and its extension includes cuda.h; leave it out",
            kind="machine",
        )


def compile_engine(engine: Any) -> None:
    """Have DeepSpeed compile what learns of a filled engine, in its first passes.

    Its own passes for the stage are taken: stages 1 and 2 reduce gradients within backward, stage 3
    gathers, releases and reduces, and from its sixth step on gathers ahead and keeps what fits.
    """
    engine.compile(backend="inductor")
    UncompiledPasses(engine)


def require_compiled_backward(model: Transformer) -> None:
    """Refuse gradients that no compiled pass has reduced and taken.

    A part of the model that PyTorch gave up compiling, or was told not to, leaves them on its
    parameters, where nothing reads them: it would not learn, without a word.

    :raises RunError: a trained parameter has a gradient.
    """
    names = [name for name, each in model.named_parameters() if each.grad is not None]
    if names:
        raise RunError(
            f"--deepcompile: {spell_count(len(names), 'parameter')} ({names[0]}, ...) computed "
            "gradients outside of compiled passes, where DeepSpeed does not reduce them; go on "
            "with --no_deepcompile"
        )


class UncompiledPasses:
    """Runs an engine's passes without gradients uncompiled.

    Under stage 3 a unit (the embeddings, a block, the head) is whole only while it computes.

    Args:
        engine: DeepSpeed's, over an OLMo-core model. It holds the hooks that this registers.
    """

    def __init__(self, engine: Any) -> None:
        self._model: Transformer = engine.module
        self._is_sharded = engine.zero_optimization_stage() == 3
        self._pass = ExitStack()
        engine.register_forward_pre_hook(self._begin)
        engine.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        if torch.is_grad_enabled():
            return
        self._pass.enter_context(torch.compiler.set_stance("force_eager"))
        if self._is_sharded:
            for unit in list_units(self._model):
                gather_while_computing(unit, self._pass)

    def _end(self, *_: object) -> None:
        self._pass.close()


def list_units(model: Transformer) -> list[nn.Module]:
    """The modules of a model that compute one after the other, and have all parameters."""
    return [model.embeddings, *model.blocks.values(), model.lm_head]


def gather_while_computing(unit: nn.Module, until: ExitStack) -> None:
    """Have stage 3 gather a unit's weights before its forward pass, and free them after it.

    :param until: takes the hooks away as it closes; compiled passes must find none.
    """
    gathered = ExitStack()
    parameters = [*unit.parameters()]

    def gather(*_: object) -> None:
        gathered.enter_context(deepspeed.zero.GatheredParameters(parameters))

    def free(*_: object) -> None:
        gathered.close()

    before = unit.register_forward_pre_hook(gather)
    after = unit.register_forward_hook(free, always_call=True)
    until.callback(before.remove)
    until.callback(after.remove)
