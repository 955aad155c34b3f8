"""The backend on FSDP2: OLMo-core's train module, whose model serves any loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.train_module import TransformerTrainModule
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FSDPModule

from open_instruct.config.training import LearnerConfig
from open_instruct.learner.backend import Metrics, refuse_other_backend
from open_instruct.learner.olmo_core.cast_copy import CastCopy
from open_instruct.learner.olmo_core.saved_state import state_of
from open_instruct.learner.optim.optimizers import set_learning_rate
from open_instruct.learner.reference import Reference
from open_instruct.learner.reference_policy import build_reference
from open_instruct.models.attention.attention import context_of
from open_instruct.models.compiled import prepare_compiler
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


class FSDP2Backend(TransformerTrainModule):
    """A `Backend`: a model that FSDP2 shards as HSDP, and OLMo-core's optimizer.

    Args:
        reduces_last: gradients stay whole on each rank, in float32, until the last microbatch of an update is done.
        olmo_core: arguments of `TransformerTrainModule`.
    """

    def __init__(self, *, reduces_last: bool = False, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        # Tensors are copied from a GPU while the training goes on, not when they are listed.
        self.state_dict_save_opts.cpu_offload = False
        self.reduces_last = reduces_last
        self.reference: Reference | None = None
        self._copy: CastCopy | None = None
        # FSDP averages gradients over the ranks that split rows too, though each has only its own tokens' part.
        context = context_of(self.model)
        self._num_averaged = get_world_size(self.dp_process_group) * (1 if context is None else context.degree)

    @property
    def train_module(self) -> FSDP2Backend:
        return self

    def compute_with(self, model: Transformer) -> None:
        """Run the passes with `model`, a copy of the trained `self.model` in another dtype; fill the copy next."""
        self._copy = CastCopy(model, self.model)

    @property
    def computing_model(self) -> Transformer:
        return self.model if self._copy is None else self._copy.model

    @property
    def compute_dtype(self) -> torch.dtype:
        if self.dp_config is not None and self.dp_config.param_dtype is not None:
            return self.dp_config.param_dtype.as_pt()
        return next(self.computing_model.parameters()).dtype

    @property
    def leaves_out_outliers(self) -> bool:
        return isinstance(self.optim, SkipStepOptimizer)

    def set_mode(self, mode: Literal["train", "eval"]) -> None:
        self._set_model_mode(mode)
        if self._copy is not None:
            self._copy.model.train(mode == "train")

    @contextmanager
    def microbatch(self, index: int, num_microbatches: int) -> Iterator[None]:
        with self._train_microbatch_context(index, num_microbatches):
            if self.reduces_last and isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == num_microbatches - 1)
            yield

    def backward(self, loss: torch.Tensor) -> None:
        if self.computing_model.compile_enabled:
            loss.register_hook(lambda _: prepare_compiler())  # in the thread of this backward pass
        (loss * self._num_averaged).backward()

    def clip(self) -> torch.Tensor:
        assert self.max_grad_norm is not None
        return self._clip_grad_norm(self.max_grad_norm)

    def set_learning_rate(self) -> float | torch.Tensor:
        return set_learning_rate(self.optim, self.scheduler, self.trainer)

    def step(self, *, loss: float, grad_norm: float) -> Metrics:
        assert self.optim is not None
        if isinstance(self.optim, SkipStepOptimizer):
            self.optim.latest_loss = torch.tensor(loss)
            self.optim.latest_grad_norm = torch.tensor(grad_norm)
        self.optim.step()
        self.model.post_optim_step()
        self.refresh_copy()
        return {"step_skipped": self.optim.step_skipped} if isinstance(self.optim, SkipStepOptimizer) else {}

    def leave_out_step(self) -> None:
        """Nothing is left to do: `zero_grads` drops the gradients."""

    def moving_reference(self, pretrained: Pretrained, *, run: Run, config: LearnerConfig, **moves: Any) -> Reference:
        return Reference(model=build_reference(pretrained, run=run, config=config), **moves)

    def refresh_copy(self) -> None:
        """Update the copy that computes; call it after every change of the weights of `model`."""
        if self._copy is not None:
            self._copy.refresh()

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        if optim is False or self.optim is None or not self.optim.state:
            # OLMo-core's method gives the optimizer its first state.
            state = super().state_dict_to_save(optim=optim)
        else:
            state = state_of(self.model, self.optim)
        if self.reference is not None:
            state |= self.reference.state_to_save(self.state_dict_save_opts)
        return state

    def state_dict_to_load(self, metadata: Metadata, *, optim: bool | None = None) -> dict[str, Any]:
        refuse_other_backend(metadata.state_dict_metadata, own="olmo_core", part="model")
        state = super().state_dict_to_load(metadata, optim=optim)
        if self.reference is not None:
            state |= self.reference.state_to_load(metadata, self.state_dict_load_opts)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.reference is not None:
            self.reference.load(state_dict, self.state_dict_load_opts)
        self.refresh_copy()
