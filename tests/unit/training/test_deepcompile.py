"""What --deepcompile compiles: passes that learn, and no others."""

import random
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from open_instruct.batching.documents import pack_documents
from open_instruct.core.errors import InputError, RunError
from open_instruct.training.deepspeed import deepcompile
from open_instruct.training.deepspeed.deepcompile import (
    UncompiledPasses,
    gather_while_computing,
    require_compiled_backward,
    require_cuda,
)
from open_instruct.training.model.forward import token_logprobs
from tests.unit.small_models import CPU, new_model
from tests.unit.training.test_compiled import row
from tests.unit.varlen_on_cpu import as_on_cuda, varlen_kernels

__all__ = ["as_on_cuda", "varlen_kernels"]  # fixtures


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(values)
        return result


class Engine(nn.Module):
    """As DeepSpeed's: it calls its module, and has no stage that shards weights."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Model()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(values)
        return result

    def zero_optimization_stage(self) -> int:
        return 2


def test_pass_without_gradients_runs_uncompiled() -> None:
    traced = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    torch.compiler.reset()
    engine = Engine()
    engine.module.compile(backend=compile_graph)
    UncompiledPasses(engine)
    values = torch.ones(2, 4)
    with torch.no_grad():
        expected = engine(values)
    assert not traced
    assert torch.equal(engine(values), expected)
    assert len(traced) == 1
    with torch.no_grad(), pytest.raises(RuntimeError):
        engine(torch.ones(2, 5))
    engine(values).sum().backward()
    assert len(traced) == 1, "a pass that fails leaves nothing behind"


def test_unit_is_whole_while_it_computes_alone() -> None:
    unit = nn.Linear(4, 4)
    calls: list[str] = []

    class Gathered:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            assert parameters == [*unit.parameters()]

        def __enter__(self) -> None:
            calls.append("gather")

        def __exit__(self, *_: object) -> None:
            calls.append("free")

    with mock.patch.object(deepcompile.deepspeed.zero, "GatheredParameters", Gathered):
        with ExitStack() as until:
            gather_while_computing(unit, until)
            unit.register_forward_hook(lambda *_: calls.append("compute"), prepend=True)
            unit(torch.ones(4))
            with pytest.raises(RuntimeError):
                unit(torch.ones(5))
        assert calls == ["gather", "compute", "free", "gather", "free"]
        unit(torch.ones(4))
        assert calls[-1] == "compute"


def test_gradient_that_no_compiled_pass_took_is_refused() -> None:
    model: Any = nn.Linear(4, 4)
    require_compiled_backward(model)
    model(torch.ones(4)).sum().backward()
    with pytest.raises(RunError, match="2 parameters"):
        require_compiled_backward(model)


def test_cpu_is_refused() -> None:
    require_cuda(torch.device("cuda", 0))
    with pytest.raises(InputError, match="--deepcompile needs CUDA"):
        require_cuda(torch.device("cpu"))


@pytest.mark.extended
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("family", "checkpointing"), [("olmo2", "none"), ("olmo3", "full")])
def test_whole_model_is_one_graph_with_every_parameter(family: str, checkpointing: str) -> None:
    """Or a gradient would be left out of the exchanges that are compiled into it; and ranks, whose
    rows differ, would not make the same exchanges. Attention takes the way that it takes on CUDA.
    """
    num_parameters: list[int] = []

    def count_parameters(graph: Any, inputs: Any) -> Any:
        num_parameters.append(sum(isinstance(each, nn.Parameter) for each in inputs))
        return graph.forward

    torch.compiler.reset()
    model: Any = new_model(family)
    if checkpointing == "full":
        model.apply_activation_checkpointing("full")
    model.train()
    model.compile(backend=count_parameters)
    rng = random.Random(0)
    rows = [row(rng, shares=shares) for shares in (False, False, True, False, True)]
    for batch in (*rows, pack_documents([])):
        scores = token_logprobs(model, batch, device=CPU)
        scores.logprobs_N.sum().backward()
        assert all(each.grad is not None for each in model.parameters())
        model.zero_grad(set_to_none=True)
    assert set(num_parameters) == {len([*model.parameters()])}
    assert len(num_parameters) <= 6
