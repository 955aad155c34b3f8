"""Runs on DeepSpeed, with what a run from the command line seldom has: nothing to learn, and broken gradients."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from olmo_core.train.callbacks import Callback

from open_instruct.config.parser import parse
from open_instruct.errors import RunError

# What `train` imports when it is called, so that the ranks share it.
from open_instruct.learner.deepspeed import policy
from open_instruct.learner.deepspeed.settings import engine_settings
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import objective_named
from open_instruct.parallel.process import stop_process
from open_instruct.train import train
from tests.ranks.jobs.train_runs import run_each

LESS_THAN_A_MATRIX = 20_000
OF_LARGE_MODELS = {
    "reduce_bucket_size": LESS_THAN_A_MATRIX,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": LESS_THAN_A_MATRIX,
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 3 * LESS_THAN_A_MATRIX),
}


def as_for_large_models(*sections: Any, **more: Any) -> dict[str, Any]:
    """DeepSpeed leaves gathered what has few values, and reduces so much at once, that a tiny model is all of that."""
    settings = engine_settings(*sections, **more)
    return settings | {"zero_optimization": settings["zero_optimization"] | OF_LARGE_MODELS}


def run(entries: list[str], commands: list[list[str]], ports: list[int]) -> None:
    """Of each command the run of its entry, where a tiny model is gathered and reduced in parts, as large ones are."""
    policy.engine_settings = as_for_large_models
    for entry, command, port in zip(entries, commands, ports, strict=True):
        run_each([command], [port], entry=entry)


SMALL = 16 * 4 * 512  # bytes: the logits of 16 positions


class Idler(Callback):
    """Before the third step comes an update that has nothing to learn from: its gradient must be forgotten."""

    def pre_step(self, batch: dict[str, Any]) -> None:
        if self.trainer.global_step == 3:
            module, update = self.trainer.train_module, batch["updates"][0]
            before = weights_of(module)
            module.forward_backward(replace(update, counts={**update.counts, "rows": 0}))
            assert module.update() == {"grad_norm": 0.0}
            assert torch.equal(weights_of(module), before)


def run_with_idle_update(commands: list[list[str]], ports: list[int]) -> list[int]:
    LogprobHead.max_logits_bytes = SMALL  # as many chunks as a microbatch needs: ranks differ
    objective = objective_named("dpo")
    return [one(objective, command, port, Idler()) for command, port in zip(commands, ports, strict=True)]


def one(objective: Objective, command: list[str], port: int, callback: Callback) -> int:
    os.environ["MASTER_PORT"] = str(port)
    config = parse(objective.config_class, command)
    objective.validate(config)
    return train(config, objective=objective, callbacks={"test": callback})


def weights_of(module: Any) -> torch.Tensor:
    return torch.cat([master.weights.flatten() for master in module.masters.own.values()])


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
        module = self.trainer.train_module
        if self.trainer.global_step == 2:
            self.module, self.before = module, weights_of(module)
            sound = module.loss
            module.loss = replace(sound, function=lambda *inputs: _broken(sound.function(*inputs)))


def _broken(outputs: Any) -> Any:
    return replace(outputs, loss=_Broken.apply(outputs.loss))


def break_gradients(commands: list[list[str]], ports: list[int]) -> list[tuple[str, bool]]:
    """What each run ends with, and whether its weights are still those before the broken step."""
    found = []
    for command, port in zip(commands, ports, strict=True):
        breaker = Breaker()
        try:
            one(objective_named("dpo"), command, port, breaker)
            found.append(("it went on", False))
        except RunError as error:
            found.append((str(error), torch.equal(weights_of(breaker.module), breaker.before)))
            stop_process()
    return found
