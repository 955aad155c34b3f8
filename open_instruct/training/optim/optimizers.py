"""Optimizers and learning-rate schedules, from flags to OLMo-core configs."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from olmo_core import optim as core
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Trainer
from olmo_core.train.callbacks import Callback

from open_instruct.config.sections import OptimizerSection
from open_instruct.training.optim.eight_bit import AdamW8bit
from open_instruct.training.optim.muon import MuonWithAdamW
from open_instruct.training.optim.sharded_adamw import ShardedAdamWConfig


@dataclass
class AdamLikeConfig(core.OptimConfig[Any]):
    """Settings of an optimizer that takes AdamW's place. Weight decay is decoupled."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class AdamW8bitConfig(AdamLikeConfig):
    """Our AdamW, with moments of 8 bits or in host memory."""

    has_codes: bool = True
    on_host: bool = False

    @classmethod
    def optimizer(cls) -> type[AdamW8bit]:
        return AdamW8bit


class MuonWithAdamWConfig(AdamLikeConfig):
    """Muon on the matrices of the blocks, AdamW on everything else."""

    @classmethod
    def optimizer(cls) -> type[MuonWithAdamW]:
        return MuonWithAdamW

    def build_groups(self, model: torch.nn.Module, strict: bool = True) -> list[dict[str, Any]]:
        del strict
        by_kind: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            by_kind[parameter.ndim == 2 and ".blocks." in f".{name}"].append(parameter)
        return [
            {"params": by_kind[True], "use_muon": True},
            {
                "params": by_kind[False],
                "use_muon": False,
                "weight_decay": 0.0,
            },
        ]


class HostSkipStepAdamW(core.SkipStepAdamW):
    """OLMo-core's SkipStepAdamW, whose losses and gradient norms are on the host.

    The host decides whether a step is skipped.
    """

    @property
    def device(self) -> torch.device:
        """The device of the losses and norms."""
        return torch.device("cpu")

    def get_step_factor(self) -> torch.Tensor:
        weights_device = self.param_groups[0]["params"][0].device
        return torch.full((), float(super().get_step_factor()), device=weights_device)

    @property
    def step_skipped(self) -> torch.Tensor:
        return 1 - super().get_step_factor()


@dataclass
class HostSkipStepAdamWConfig(core.SkipStepAdamWConfig):
    """OLMo-core's settings, for our `HostSkipStepAdamW`."""

    @classmethod
    def optimizer(cls) -> type[core.SkipStepAdamW]:
        return HostSkipStepAdamW


@dataclass
class SkipStepHistory(Callback):
    """Carries a skip-step optimizer's rolling window over a restart.

    OLMo-core leaves it out of its state.
    """

    optimizer: core.SkipStepOptimizer

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.optimizer._losses, "grad_norms": self.optimizer._grad_norms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Older checkpoints have plain numbers.
        self.optimizer._losses = [torch.as_tensor(each) for each in state_dict["losses"]]
        self.optimizer._grad_norms = [torch.as_tensor(each) for each in state_dict["grad_norms"]]


def build_optimizer_config(
    optim: OptimizerSection,
    *,
    device: torch.device,
    names: Collection[str],
    on_host: bool = False,
    has_dtensors: bool = False,
) -> core.OptimConfig[Any]:
    """The OLMo-core config of `--optimizer`.

    PyTorch computes AdamW in one pass on CUDA and on CPUs (`fused`).

    :param names: of the parameters. OLMo-core refuses a pattern that names nothing.
    :param on_host: whether the host of a device has AdamW's moments.
    :param has_dtensors: whether weights may be DTensors, as FSDP2 shards them.
    """
    common: dict[str, Any] = {
        "lr": optim.learning_rate,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_epsilon,
        "weight_decay": optim.weight_decay,
    }
    if optim.optimizer == "muon":
        return MuonWithAdamWConfig(**common)
    patterns = [
        pattern
        for pattern in optim.not_decayed
        if any(fnmatchcase(name, pattern) for name in names)
    ]
    if patterns:
        no_decay = core.OptimGroupOverride(params=patterns, opts={"weight_decay": 0.0})
        common["group_overrides"] = [no_decay]
    if optim.optimizer == "skip_step_adamw":
        return HostSkipStepAdamWConfig(**common)
    if optim.optimizer == "adamw_8bit" or on_host:
        return AdamW8bitConfig(has_codes=optim.optimizer == "adamw_8bit", on_host=on_host, **common)
    adamw = ShardedAdamWConfig if has_dtensors else core.AdamWConfig
    return adamw(fused=True, **common)


def build_scheduler(optim: OptimizerSection, *, num_steps: int) -> Scheduler:
    """Warm-up, then the shape asked for, over `num_steps` optimizer steps.

    The schedule ends one step after the last, so that the last step still learns something.
    """
    num_warmup_steps = round(optim.warmup_ratio * num_steps)
    if optim.lr_scheduler_type == "constant":
        return core.ConstantWithWarmup(warmup=num_warmup_steps)
    last = num_steps + 1
    if optim.lr_scheduler_type == "linear":
        return core.LinearWithWarmup(warmup=num_warmup_steps, alpha_f=0.0, t_max=last)
    return core.CosWithWarmup(warmup=num_warmup_steps, alpha_f=0.0, t_max=last)


def set_learning_rate(
    optim: torch.optim.Optimizer | None, scheduler: Scheduler | None, trainer: Trainer
) -> float | torch.Tensor:
    """Set the learning rate of every group of the optimizer.

    Returns that of the first, which has most weights.
    """
    assert optim is not None
    if scheduler is None:
        rate: float | torch.Tensor = optim.param_groups[0]["lr"]
        return rate
    rates = [scheduler.set_lr(group, trainer) for group in optim.param_groups]
    return rates[0]
