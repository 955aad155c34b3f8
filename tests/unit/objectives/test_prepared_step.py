"""A loss that must know all rows of a step before it learns from the first: `BoundLoss.prepare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from open_instruct.batching.steps import build_step_batch
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.core.batch_values import RowValues
from open_instruct.core.records import Batch, Metric, StepBatch
from open_instruct.models.build import build_model
from open_instruct.objectives.objective import BoundLoss, Gather, LossOutputs, TokenLogprobs
from open_instruct.parallel.reduce import gather_rows
from tests.unit.objective_runs import all_gradients, train_module
from tests.unit.training.test_training_pieces import make_pairs, shape_of

SIZE = {
    **SIZES["tiny"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanValues(RowValues):
    """The mean log-prob of a step."""

    mean: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Centered(BoundLoss):
    """The log-probs of a step minus their mean over all of its tokens, squared; and what was seen
    on the way.
    """

    scores_before_step: bool = True
    prepared: list[torch.Tensor] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)

    def prepare(
        self, step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather
    ) -> StepBatch:
        self.prepared.extend(score.logprobs_N for score in scores)
        mean = gather(torch.cat(self.prepared)).mean()
        batches = (replace(batch, values=MeanValues(mean=mean)) for batch in step.microbatches)
        return replace(step, microbatches=tuple(batches))

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        self.seen.append(scores.logprobs_N)
        mean = MeanValues.read(batch.values).mean
        loss = (scores.logprobs_N - mean).square().sum() / counts["labels"]
        return LossOutputs(
            loss=loss, metrics={"loss": Metric(value=loss.detach(), reduction="sum")}
        )


def step_of(microbatches: int, folder: Path) -> tuple[Centered, float, torch.Tensor]:
    """The loss of a step of four pairs in so many microbatches, and its gradient."""
    torch.manual_seed(0)
    loss = Centered()
    model = build_model(tiny_config("olmo2", SIZE, vocab_size=64, tie=False), init_device="cpu")
    module, recorder = train_module(loss, model, folder)
    with torch.no_grad():
        for index, parameter in enumerate(module.model.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter))
    shape = shape_of(
        max_samples_per_microbatch=4 // microbatches, max_microbatches=microbatches, packing=False
    )
    module.train_batch(
        {
            "step": build_step_batch(
                make_pairs(4), [(0,), (1,), (2,), (3,)], shape=shape, rank=0, num_ranks=1
            )
        }
    )
    return loss, recorder.metrics["loss"], all_gradients(module.model)


def test_all_rows_are_scored_without_gradient_before_the_first_is_learned(tmp_path: Path) -> None:
    loss, _, gradient = step_of(2, tmp_path)
    assert len(loss.prepared) == len(loss.seen) == 2 and gradient.any()
    for before, now in zip(loss.prepared, loss.seen, strict=True):
        assert not before.requires_grad and now.requires_grad
        torch.testing.assert_close(before, now.detach())


def test_loss_of_the_whole_step_does_not_depend_on_how_it_is_cut(tmp_path: Path) -> None:
    (_, whole, whole_gradient), *cuts = (step_of(number, tmp_path) for number in (1, 2, 4))
    for _, loss, gradient in cuts:
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(gradient, whole_gradient)


def test_prepared_step_has_all_rows_on_one_process() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert gather_rows(rows, group=None).equal(rows)
