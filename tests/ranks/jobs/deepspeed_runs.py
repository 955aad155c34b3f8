"""Runs on DeepSpeed, with what a run from the command line seldom has: nothing to learn, broken
gradients.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from olmo_core.train.callbacks import Callback

from open_instruct.commands.run_flags import parse_run
from open_instruct.core.errors import InputError, RunError
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.objectives.registry import load_objective
from open_instruct.parallel.process import stop_process
from open_instruct.train import train

# What `train` imports when it is called, so that the ranks share it.
from open_instruct.training import export, loop  # noqa: F401
from open_instruct.training.deepspeed import zero
from open_instruct.training.deepspeed.library import deepspeed
from open_instruct.training.deepspeed.settings import engine_settings
from open_instruct.training.policy import Policy
from open_instruct.training.rows import datasets  # noqa: F401

SMALL = 16 * 4 * 512  # bytes: the logits of 16 positions

LESS_THAN_A_MATRIX = 20_000
OF_LARGE_MODELS = {
    "reduce_bucket_size": LESS_THAN_A_MATRIX,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": LESS_THAN_A_MATRIX,
    **dict.fromkeys(
        ("stage3_max_live_parameters", "stage3_max_reuse_distance"), 3 * LESS_THAN_A_MATRIX
    ),
}


def as_for_large_models(*sections: Any, **more: Any) -> dict[str, Any]:
    """DeepSpeed leaves gathered what has few values, and reduces so much at once, that a tiny model
    is all of that.
    """
    settings = engine_settings(*sections, **more)
    return settings | {"zero_optimization": settings["zero_optimization"] | OF_LARGE_MODELS}


def run(runs: list[dict[str, Any]], ports: list[int]) -> list[Any]:
    """One after the other: of each its `entry` with the words of `command`, and what it had to
    tell.

    `persists` leaves small parameters gathered, `does` is one of `CALLBACKS`, and `adam` the kernel
    of DeepSpeed that takes the steps, or what stands in for it here.
    """
    return [one(port, **each) for each, port in zip(runs, ports, strict=True)]


def one(
    port: int,
    *,
    command: list[str],
    entry: str = "dpo",
    persists: bool = False,
    does: str | None = None,
    adam: str | None = None,
) -> Any:
    os.environ["MASTER_PORT"] = str(port)
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.pop("LOCAL_RANK", None)  # as without a launcher
    objective = load_objective(entry)
    callback = None if does is None else CALLBACKS[does]()
    with ExitStack() as held:
        if not persists:
            held.enter_context(mock.patch.object(zero, "engine_settings", as_for_large_models))
        if does == "idle":  # as many chunks as a microbatch needs: ranks differ
            held.enter_context(mock.patch.object(LogprobHead, "max_logits_bytes", SMALL))
        if adam is not None:
            held.enter_context(stepped_by(adam))
        try:
            config = parse_run(objective.config_class, command)
            objective.validate(config)
            train(
                config,
                objective=objective,
                callbacks={} if callback is None else {"test": callback},
            )
        except (InputError, RunError) as error:
            stop_process()
            return str(error), callback is not None and callback.is_unharmed()
    return None


@contextmanager
def stepped_by(adam: str) -> Iterator[None]:
    """DeepSpeed's own Adam, with its formula where its compiled kernel would be."""

    def fused(
        chunk_size: int,
        flag: Any,
        tensors: Any,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        *more: Any,
    ) -> None:
        del chunk_size, flag
        for gradient, weights, first, second in zip(*tensors, strict=True):
            adamw_(weights, gradient, first, second, lr, (beta1, beta2), eps, step, more[-1])

    def on_cpu(
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        *more: Any,
    ) -> None:
        del optimizer_id
        _, weights, gradient, first, second = more
        adamw_(weights, gradient, first, second, lr, (beta1, beta2), eps, step, decay)

    def nothing(*_: Any) -> None: ...

    kernels = SimpleNamespace(
        multi_tensor_adam=fused, adam_update=on_cpu, create_adam=nothing, destroy_adam=nothing
    )
    builder = getattr(deepspeed.ops.op_builder, f"{adam}Builder")
    with (
        mock.patch.object(zero, "choose_adam_kind", return_value=adam),
        mock.patch.object(builder, "load", return_value=kernels),
    ):
        yield


@torch.no_grad()
def adamw_(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    decay: float,
) -> None:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2."""
    weights.mul_(1 - lr * decay)
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    denominator = (second / (1 - betas[1] ** step)).sqrt_().add_(eps)
    weights.addcdiv_(first, denominator, value=-lr / (1 - betas[0] ** step))


class Idler(Callback):
    """Before the third step comes an update that has nothing to learn from: its gradient must be
    forgotten.
    """

    def pre_step(self, batch: dict[str, Any]) -> None:
        if self.trainer.global_step == 3:
            policy, update = policy_of(self.trainer), batch["updates"][0]
            before = weights_of(policy)
            policy.forward_backward(replace(update, counts={**update.counts, "rows": 0}))
            assert policy.update() == {"grad_norm": 0.0}
            assert torch.equal(weights_of(policy), before)


def policy_of(trainer: Any) -> Policy:
    """A callback is told of the policy's backend alone."""
    (policy,) = (
        each
        for each in gc.get_objects()
        if type(each) is Policy and each.backend is trainer.train_module
    )
    return policy


def weights_of(policy: Any) -> torch.Tensor:
    return torch.cat([master.weights.flatten() for master in policy.backend.masters.parts.values()])


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.inf


class Breaker(Callback):
    """From the second step on gradients are broken; what the weights were when that one began."""

    def pre_step(self, batch: dict[str, Any]) -> None:
        del batch
        if self.trainer.global_step == 2:
            self.policy = policy_of(self.trainer)
            self.before = weights_of(self.policy)
            sound = self.policy.microbatch_loss
            self.policy.microbatch_loss = lambda *inputs: _broken(sound(*inputs))

    def is_unharmed(self) -> bool:
        return torch.equal(weights_of(self.policy), self.before)


def _broken(outputs: Any) -> Any:
    return replace(outputs, loss=_Broken.apply(outputs.loss))


CALLBACKS = {"idle": Idler, "break": Breaker}
