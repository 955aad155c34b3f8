"""A job in which OLMo-core's own Trainer trains a tiny model, and writes its checkpoint."""

from dataclasses import dataclass, field
from typing import Any

import torch
from olmo_core import train
from olmo_core.config import DType
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.optim import AdamWConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
from olmo_core.train.train_module.transformer import (
    TransformerDataParallelConfig,
    TransformerTrainModuleConfig,
)

from tests.olmo_core_checkpoints import make_config

LENGTH = 16
NUM_STEPS = 10


@dataclass
class LossNotes(Callback):
    """Notes the loss of each step, on the rank that has it."""

    losses: list[float] = field(default_factory=list)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            self.losses.append(metrics["train/CE loss"])


class TokenLoader(DataLoaderBase):
    """Rows of counting tokens, others on each rank."""

    @property
    def total_batches(self) -> int:
        return NUM_STEPS

    def _iter_batches(self) -> Any:
        for step in range(NUM_STEPS):
            start = step * 31 + get_rank() * 7
            yield {"input_ids": (torch.arange(start, start + LENGTH) % 250).unsqueeze(0)}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        return LENGTH * get_world_size()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def reshuffle(self, epoch: int | None = None, **_: Any) -> None: ...
    def get_mock_batch(self) -> dict[str, Any]:
        return next(iter(self._iter_batches()))


def train_and_save(
    folder: str, kind: str, vocab_size: int, fields: dict[str, Any], start: str | None = None
) -> float | None:
    """Train from the weights in `start`, or from random ones, and write `folder`/step10 with
    `fields` beside the model's in config.json.

    Returns the loss of the first step.
    """
    train.prepare_training_environment(backend="cpu:gloo", seed=3)
    model_config = make_config(kind, vocab_size=vocab_size)
    model = model_config.build(init_device="meta")
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-2),
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp, param_dtype=DType.float32
        ),
    ).build(model, device=torch.device("cpu"))
    loader = TokenLoader(
        work_dir=folder,
        global_batch_size=LENGTH * get_world_size(),
        dp_world_size=get_world_size(),
        dp_rank=get_rank(),
    )
    config = train.TrainerConfig(save_folder=folder, device="cpu")
    config.max_duration = train.Duration.steps(NUM_STEPS)
    config.async_bookkeeping = False  # over gloo its second thread hangs now and then
    config.callbacks["checkpointer"] = CheckpointerCallback(
        save_interval=NUM_STEPS, save_async=False
    )
    config.callbacks["config_saver"] = ConfigSaverCallback()
    losses: list[float] = []
    config.callbacks["losses"] = LossNotes(losses=losses)
    trainer = config.build(module, loader)
    saver = trainer.callbacks["config_saver"]
    saver.config = {"model": model_config.as_config_dict(), **fields}  # type: ignore[attr-defined]
    if start is not None:
        trainer.load_checkpoint(start, load_trainer_state=False, load_optim_state=False)
    trainer.fit()
    return losses[0] if losses else None
