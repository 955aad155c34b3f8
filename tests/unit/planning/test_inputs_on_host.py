"""Inputs of recomputed blocks that wait in host memory: the same gradients, from as little as is
planned.

Here the CPU is taken for the device: copies are made as for CUDA, by streams that do nothing.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode

from open_instruct.batching.prefixes import FullRows
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.models.build import build_model
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.parts import INPUTS
from open_instruct.planning.memory.phases import memory_by_phase
from open_instruct.planning.subject.read_shape import shape_from_fields
from open_instruct.planning.subject.workload import Workload
from open_instruct.training.model import kernels
from open_instruct.training.model.inputs_on_host import InputsOnHost
from open_instruct.training.model.kernels import build_activation_checkpointing, kernel_warnings

CPU = torch.device("cpu")
SIZE = {**SIZES["tiny"], "hidden_size": 64, "intermediate_size": 96}
HF_CONFIG = tiny_config("olmo2", SIZE, vocab_size=128, tie=False)


def checkpointed_model() -> Any:
    torch.manual_seed(0)
    model = build_model(HF_CONFIG, init_device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.apply_activation_checkpointing(Mode.full)
    return model


@pytest.fixture
def inputs() -> InputsOnHost:
    return InputsOnHost(CPU)


@pytest.fixture
def offloaded(inputs: InputsOnHost) -> Any:
    model = checkpointed_model()
    for block in model.blocks.values():
        inputs.hook_block(block)
    return model


def loss_of(model: Any, num_tokens: int) -> torch.Tensor:
    ids_BT = (torch.arange(num_tokens) * 7 % 128).unsqueeze(0)
    loss: torch.Tensor = model(
        ids_BT, labels=ids_BT, loss_reduction="sum", return_logits=False
    ).loss
    return loss


def gradients(model: Any, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Of microbatches of these lengths, added up."""
    for parameter in model.parameters():
        parameter.grad = None
    for num_tokens in lengths:
        loss_of(model, num_tokens).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_are_the_same_bit_by_bit(offloaded: Any, inputs: InputsOnHost) -> None:
    lengths = (40, 24, 56)
    for ours, theirs in zip(
        gradients(offloaded, lengths), gradients(checkpointed_model(), lengths), strict=True
    ):
        assert theirs.any() and torch.equal(ours, theirs)
    assert not inputs._inputs
    # One buffer a block, for all microbatches.
    assert len(inputs._free_buffers) == SIZE["num_hidden_layers"]


def test_inputs_are_not_kept_without_a_backward_pass(offloaded: Any, inputs: InputsOnHost) -> None:
    with torch.no_grad():
        loss_of(offloaded, 40)
    assert not inputs._inputs and not inputs._free_buffers


def test_pass_that_was_given_up_changes_nothing(offloaded: Any) -> None:
    """Its inputs are still there when the next one's are asked for."""
    loss_of(offloaded, 40)
    with pytest.raises(RuntimeError), torch.no_grad():
        offloaded.blocks["1"](torch.zeros(1, 8, SIZE["hidden_size"] + 1))
    x = torch.ones(3, requires_grad=True)
    y = x * x
    assert y.grad_fn._saved_self is x  # type: ignore[union-attr]  # the hooks are gone, though a block failed
    for ours, theirs in zip(
        gradients(offloaded, (24,)), gradients(checkpointed_model(), (24,)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_inputs_on_host_are_as_planned(offloaded: Any, inputs: InputsOnHost) -> None:
    num_tokens = 40
    shape = shape_from_fields(HF_CONFIG.to_dict(), name="tiny", where="config.json")
    layout = resolve_layout([1], single_device=True)
    workload = Workload(
        algorithm="sft",
        tokens_per_microbatch=num_tokens,
        rows=FullRows(length=num_tokens),
        label_tokens_per_microbatch=num_tokens,
        num_microbatches=1,
        param_dtype="float32",
        checkpointing="offload",
    )
    loss = loss_of(offloaded, num_tokens)
    on_device = [each.on_device for each in inputs._inputs if each.on_device is not None]
    assert len(inputs._inputs) == SIZE["num_hidden_layers"] and len(on_device) == 1
    kinds: dict[str, dict[str, int]] = {}
    for mode in ("full", "offload"):
        phases = memory_by_phase(MemoryModel(shape, layout, replace(workload, checkpointing=mode)))  # type: ignore[arg-type]
        kinds[mode] = {phase.name: phase.total_bytes for phase in phases}
    stream_bytes = on_device[0].nbytes
    assert (
        kinds["full"]["forward"] - kinds["offload"]["forward"]
        == (SIZE["num_hidden_layers"] - 1) * stream_bytes
    )
    loss.backward()
    on_host = MemoryModel(shape, layout, workload).host_parts()[INPUTS]
    assert (
        on_host
        == sum(buffer.nbytes for buffer in inputs._free_buffers)
        >= SIZE["num_hidden_layers"] * stream_bytes
    )
    assert not any(
        MemoryModel(shape, layout, replace(workload, on_cuda=False)).host_parts().values()
    )


def test_blocks_are_recomputed_with_a_message_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemorySection(activation_checkpointing="offload")
    model = build_model(HF_CONFIG)
    for device in (CPU, torch.device("cuda")):
        config = build_activation_checkpointing(memory, model=model, device=device)
        assert config is not None and config.mode == Mode.full
    warnings = kernel_warnings(memory, param_dtype="bfloat16", device=CPU)
    assert ["--activation_checkpointing offload" in warning for warning in warnings] == [True]
    monkeypatch.setattr(kernels, "compiler_problem", lambda device: None)
    assert not any(kernel_warnings(memory, param_dtype="bfloat16", device=torch.device("cuda")))
