"""The learner on DeepSpeed: the other backend's forward passes, losses and checks; ZeRO holds the shards and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import AdamWConfig
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from open_instruct.learner.backend import OF_ZERO, Metrics, refuse_other_backend
from open_instruct.learner.deepspeed.library import deepspeed
from open_instruct.learner.deepspeed.shards import Masters, partition
from open_instruct.learner.olmo_core.train_module import GRAD_NORM, ObjectiveTrainModule
from open_instruct.models.box_files import Part
from open_instruct.records import Metric


class HeldAdamW(torch.optim.AdamW):
    """Takes no step while `is_held` says so. DeepSpeed knows the gradient's norm when it calls, and not earlier."""

    is_held: Callable[[], bool]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.is_held():
            super().step(closure)


# Those that it would not warn of.
deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS.append(HeldAdamW)


@dataclass
class HeldAdamWConfig(AdamWConfig):
    @classmethod
    def optimizer(cls) -> type[torch.optim.AdamW]:
        return HeldAdamW


@contextmanager
def _embeddings_alone(model: Transformer) -> Iterator[None]:
    """Within, the head does not show a matrix that it shares with the embeddings.

    Stage 3 takes the gradients of a head that is gathered as one when its backward pass ends, and to this one the
    embeddings have still to add theirs. So it is reduced as what it is too, a matrix of the embeddings.
    """
    matrix, embeddings = model.lm_head.w_out, model.embeddings
    assert embeddings is not None
    shared = matrix.weight if matrix.weight is embeddings.weight else None
    if shared is not None:
        del matrix.weight
    yield
    if shared is not None:
        matrix.weight = shared


class DeepSpeedTrainModule(ObjectiveTrainModule):
    """An `ObjectiveTrainModule` whose model and optimizer are DeepSpeed's.

    It is built without weights: fill them, then call `masters.changed`.

    :param settings: DeepSpeed's configuration; every other argument is `ObjectiveTrainModule`'s.
    """

    def __init__(self, *, settings: Mapping[str, Any], model: Transformer, **more: Any) -> None:
        if settings["zero_optimization"]["stage"] == 3:
            dtype = next(model.parameters()).dtype
            model.init_weights = MethodType(partition(settings, dtype=dtype), model)  # type: ignore[method-assign]
            # How often the head runs on a microbatch differs from rank to rank; its weights are gathered once for all.
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.lm_head)])
        super().__init__(model=model, **more)
        assert isinstance(self.optim, HeldAdamW)
        self.optim.is_held = self._is_held
        self._norm: float | None = None
        with _embeddings_alone(self.model):
            self.engine = deepspeed.initialize(
                model=self.model, optimizer=self.optim, config=dict(settings), dist_init_required=False
            )[0]
        self.masters = Masters(self.engine, rank=dist.get_rank())

    @property
    def computing_model(self) -> Transformer:
        """The engine, which is called like its model: called itself, that would not gather what stage 3 has shared."""
        return cast(Transformer, self.engine)

    def _set_model_mode(self, mode: Literal["train", "eval"]) -> None:
        super()._set_model_mode(mode)
        self.engine.train(mode == "train")

    def zero_grads(self) -> None:
        """DeepSpeed lets go of them in its step."""

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def clipped(self) -> dict[str, Metric]:
        """Nothing: ranks have not met, and will in the step."""
        return {}

    def take_step(self) -> None:
        self._norm = None
        self.engine.step()
        self._is_held()  # where DeepSpeed found by itself that the gradient is not finite, it did not ask

    def _is_held(self) -> bool:
        """Whether there is nothing to step with. Within the engine's step, when gradients are reduced."""
        if self._norm is None:
            norm = self.engine.optimizer._global_grad_norm if self.engine.zero_optimization() else self._clip()
            self._norm = float(norm)
        return self._has_nothing_to_learn or not math.isfinite(self._norm)

    def _clip(self) -> torch.Tensor:
        """Without ZeRO every rank has the whole gradient."""
        assert self.max_grad_norm is not None
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

    def update(self) -> Metrics:
        """See `ObjectiveTrainModule.update`. The norm is checked here; if it is not finite, no step was taken."""
        metrics = super().update()
        if self._has_nothing_to_learn:
            self.take_step()  # which is held, and lets go of the gradients
            return metrics
        assert self._norm is not None
        self._check_gradient(self._norm)
        return {**metrics, GRAD_NORM: self._norm}

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        """Flat ranges, of any stage alike, so that a run may go on under another stage and on other ranks."""
        of_masters: dict[str, dict[str, Part]] = {}
        for name, master in self.masters.own.items():
            shape = (math.prod(self.masters.shapes[name]),)
            for key, values in {"weights": master.weights, **master.moments}.items():
                of_masters.setdefault(key, {})[name] = Part(local=values, start=(master.start,), shape=shape)
        return {OF_ZERO: {**of_masters, "num_steps": self.masters.num_steps}}

    def state_dict_to_load(self, metadata: Metadata, *, optim: bool | None = None) -> dict[str, Any]:
        refuse_other_backend(metadata.state_dict_metadata, own="deepspeed")
        return self.state_dict_to_save(optim=optim)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Its parts were filled in place."""
        self.masters.changed(num_steps=state_dict[OF_ZERO]["num_steps"])
