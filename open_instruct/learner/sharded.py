"""What the two backends have in common: OLMo-core's train module with a reference, filled from a start model."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TransformerTrainModule

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.model.inputs_on_host import offload_inputs
from open_instruct.learner.optim.optimizers import set_learning_rate
from open_instruct.learner.reference import Reference
from open_instruct.models.load import parameter_shapes, stream_load
from open_instruct.models.lora.adapters import adapt, fill_adapter
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.peers import doing
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.wording import counted

# The key of a moving reference policy in a checkpoint.
IN_CHECKPOINT = "reference"


def unfilled(pretrained: Pretrained, config: LearnerConfig, *, init_device: str) -> SegmentTransformer:
    """The start model without its weights, with the adapters that the flags ask for."""
    doing("loading the start model")
    model = pretrained.build(init_device=init_device)
    if config.adapters is not None:
        adapt(model, config.adapters, dtype=getattr(torch, config.model.param_dtype))
    return model


class ShardedModule(TransformerTrainModule):
    """The common part of two `Backend`s; see there. It is built without weights: call `fill`."""

    reference: Reference | None = None

    @property
    def computing_model(self) -> Transformer:
        return self.model

    @property
    def compute_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def leaves_out_outliers(self) -> bool:
        return isinstance(self.optim, SkipStepOptimizer)

    @property
    def train_module(self) -> TransformerTrainModule:
        return self

    def weights_changed(self) -> None:
        """Have the passes compute with weights that were written from outside."""

    def fill(self, pretrained: Pretrained, *, run: Run, config: LearnerConfig) -> None:
        """Stream the start model into the shards. Collective."""
        offload_inputs(self.computing_model, config.memory, run.process.device)
        report = stream_load(self.model, pretrained.files, pretrained.names)
        if config.adapters is not None:
            fill_adapter(self.model, config.adapters, seed=config.optim.seed, start=pretrained.adapter)
        self.weights_changed()
        num_params = sum(map(prod, parameter_shapes(self.model).values()))
        run.console.say(
            f"loaded {counted(report.num_tensors, 'tensor')} ({num_params / 1e6:,.1f}M parameters) "
            f"in {report.wall_time_s:.1f} s"
        )

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        self._set_model_mode(mode)
        self.computing_model.train(mode == "train")

    def set_learning_rate(self) -> float | torch.Tensor:
        return set_learning_rate(self.optim, self.scheduler, self.trainer)

    def state_of_reference(self) -> dict[str, Any]:
        """The part of a checkpoint for a reference that moves, which is read in place."""
        if self.reference is None or self.reference.update_freq is None:
            return {}
        return {IN_CHECKPOINT: self.reference.state()}
