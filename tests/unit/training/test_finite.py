"""No update is taken from a gradient that is not finite, and no weights are written that are
not.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.optim import SkipStepOptimizer

from open_instruct.checkpoints import resume as checkpoints
from open_instruct.checkpoints.resume import check_weights
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.lora import LoRASection
from open_instruct.config.sections import OptimSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Batch, Metric, PackedBatch, StepBatch
from open_instruct.models.build import build_model
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.models.shards import flat_shard
from open_instruct.objectives.objective import BoundLoss, LossOutputs
from open_instruct.olmo_core_train_modules import ObjectiveTrainModule
from open_instruct.training.optim.optimizers import build_optimizer_config
from open_instruct.training.policy import MAX_LEFT_OUT, Policy

CPU = torch.device("cpu")
SIZE = {
    **SIZES["tiny"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IDS_BT = torch.zeros(1, 2, dtype=torch.long)
PACKED = PackedBatch(
    input_ids_BT=IDS_BT,
    labels_BT=IDS_BT,
    label_positions_N=IDS_BT[0],
    sequence_ids_N=IDS_BT[0],
    document_lengths=None,
    num_sequences=1,
    num_tokens=2,
)


class Recorder:
    """What a train module asks of its trainer."""

    global_step = 3
    global_train_tokens_seen = 0

    def __init__(self, folder: Path) -> None:
        self.save_folder = str(folder)
        self.metrics: dict[str, float] = {}

    def record_metric(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self.metrics[name] = float(value)


class Summed(Policy):
    """`factor` of a step is the gradient of every weight, while the loss stays finite;

    `loss` is what is told.
    """

    def microbatch_loss(self, batch: Batch, counts: Any) -> LossOutputs:
        total = sum(parameter.sum() for parameter in self.model.parameters())
        assert isinstance(total, torch.Tensor)
        factor = counts["factor"]
        loss = (
            (total - total.detach()) * factor
            if math.isfinite(factor)
            else (total - total.detach()).sqrt()
        )
        return LossOutputs(loss=loss, metrics={"loss": Metric(value=counts["loss"])})


class Unused(BoundLoss):
    def compute(self, *arguments: Any) -> LossOutputs:
        raise AssertionError


def module_of(optimizer: Any, folder: Path, kind: type[Summed] = Summed) -> ObjectiveTrainModule:
    module = ObjectiveTrainModule(
        loss=Unused(),
        model=build_model(tiny_config("olmo2", SIZE, vocab_size=64, tie=False), init_device="cpu"),
        optim=build_optimizer_config(
            OptimSection(optimizer=optimizer, learning_rate=0.1), device=CPU, names=()
        ),
        rank_microbatch_size=2,
        max_sequence_length=2,
        max_grad_norm=1.0,
        device=CPU,
    )
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.fill_(0.5)
    module.policy = kind(module, module.policy.loss)
    module._trainer = Recorder(folder)  # type: ignore[assignment]
    return module


def take_step(
    module: ObjectiveTrainModule, *, factor: float = 1.0, loss: float = 2.0
) -> dict[str, float]:
    module.zero_grads()
    counts: Any = {"rows": 1, "factor": factor, "loss": loss}
    module.train_batch(
        {"step": StepBatch(microbatches=(Batch(packed=PACKED, row_ids=(0,)),), counts=counts)}
    )
    module.optim_step()
    return module.trainer.metrics  # type: ignore[attr-defined, no-any-return]


def weights_of(module: ObjectiveTrainModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.model.parameters()])


@pytest.mark.parametrize(
    ("optimizer", "broken", "told"),
    [
        ("adamw", {"factor": math.inf}, "the norm of the gradient is (nan|inf) at step 3"),
        ("adamw", {"factor": 1e25}, "the norm of the gradient is inf at step 3"),
        ("muon", {"factor": math.inf}, "the norm of the gradient is (nan|inf) at step 3"),
        (
            "adamw",
            {"loss": math.nan},
            r"the loss is nan \(in a microbatch with row 0 of the .*\) at step 3",
        ),
        (
            "skip_step_adamw",
            {"loss": math.inf},
            r"the loss is inf \(in a microbatch with row 0 of the .*\) at step 3",
        ),
    ],
)
def test_step_that_is_not_finite_is_not_taken(
    tmp_path: Path, optimizer: str, broken: dict[str, float], told: str
) -> None:
    module = module_of(optimizer, tmp_path)
    metrics = take_step(module)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(weights_of(module).numel()))
    before = weights_of(module)
    with pytest.raises(
        RunError, match=f"{told}, which was not taken: .*lower --learning_rate.*no checkpoint"
    ):
        take_step(module, **broken)
    assert torch.equal(weights_of(module), before)


def test_rows_of_the_broken_microbatch_are_named(tmp_path: Path) -> None:
    class OfRows(Summed):
        def microbatch_loss(self, batch: Batch, counts: Any) -> LossOutputs:
            value = torch.tensor(math.nan if 7 in batch.row_ids else 1.0)
            return replace(
                super().microbatch_loss(batch, counts), metrics={"loss": Metric(value=value)}
            )

    rows_of_microbatches = ((3, 1), (7, 4), (2,))
    batches = tuple(Batch(packed=PACKED, row_ids=row_ids) for row_ids in rows_of_microbatches)
    counts: Any = {"rows": 5, "factor": 1.0, "loss": 1.0}
    with pytest.raises(
        RunError, match=r"the loss is nan \(in a microbatch with rows 4, 7 of the training data"
    ):
        module_of("adamw", tmp_path, OfRows).policy.forward_backward(
            StepBatch(microbatches=batches, counts=counts)
        )


def test_skip_step_optimizer_leaves_out_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    module, undisturbed = (module_of("skip_step_adamw", tmp_path) for _ in range(2))
    assert isinstance(module.optim, SkipStepOptimizer)
    take_step(module)
    for _ in range(MAX_LEFT_OUT):
        metrics = take_step(module, factor=math.inf)
        assert metrics["step_skipped"] == 1 and not math.isfinite(metrics["grad_norm"])
    take_step(module)
    # Neither the moments nor the window that outliers are judged by have seen it.
    take_step(undisturbed)
    take_step(undisturbed)
    assert torch.equal(weights_of(module), weights_of(undisturbed))
    assert len(module.optim._losses) == len(module.optim._grad_norms) == 2
    for _ in range(MAX_LEFT_OUT):
        take_step(module, factor=math.inf)
    with pytest.raises(RunError, match="which was not taken"):
        take_step(module, factor=math.inf)


@pytest.mark.parametrize(
    ("weight", "dtype", "is_fine"),
    [
        (1e18, torch.float32, True),
        (1e18, torch.bfloat16, True),
        (6e4, torch.float16, True),
        (7e4, torch.float16, False),
        (-1e30, torch.bfloat16, False),
        (1e30, torch.float32, False),
        (math.nan, torch.float32, False),
        (-math.inf, torch.float32, False),
    ],
)
def test_weights_are_looked_at_before_they_are_written(
    weight: float, dtype: torch.dtype, is_fine: bool, tmp_path: Path
) -> None:
    model = build_model(tiny_config("olmo2", SIZE, vocab_size=64, tie=False), init_device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        parameter.view(-1)[-1] = weight
    if is_fine:
        check_weights(model, what="it", folder=tmp_path, dtype=dtype)
    else:
        with pytest.raises(
            RunError,
            match=r"so it was not written: .* lower --learning_rate .*\. This run has no checkpoint",
        ):
            check_weights(model, what="it", folder=tmp_path, dtype=dtype)


def test_adapters_are_looked_at_where_ranks_hold_ranges_of_them(tmp_path: Path) -> None:
    """Of which the parameter itself has nothing, as under ZeRO-3."""
    model = build_model(tiny_config("olmo2", SIZE, vocab_size=64, tie=False), init_device="cpu")
    add_adapters(model, LoRASection(lora_r=2), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    check_weights(model, what="it", folder=tmp_path)
    broken = next(parameter for name, parameter in model.named_parameters() if "lora_A" in name)
    held = flat_shard(torch.tensor([math.nan]), tuple(broken.shape), [(0, 1)], rank=0)
    broken.local_shard = held  # type: ignore[attr-defined]
    broken.data = torch.empty(0)
    with pytest.raises(RunError, match="so it was not written"):
        check_weights(model, what="it", folder=tmp_path)


def test_error_names_the_last_checkpoint_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints.last_checkpoint(tmp_path) == "This run has no checkpoint"
    monkeypatch.setattr(checkpoints.step_folder, "latest_step", lambda folder: 40)
    assert f"{tmp_path}/step40, is from before" in checkpoints.last_checkpoint(tmp_path)
