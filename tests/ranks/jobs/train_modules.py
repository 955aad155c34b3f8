"""The scripts of examples/olmo_core, one after the other, in the same ranks; and one at home in
OLMo-core, with its configs, its checkpoint and more of its callbacks.
"""

import json
import os
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from olmo_core import train
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.eval import Evaluator
from olmo_core.optim import AdamWConfig, ConstantWithWarmup, SkipStepAdamWConfig
from olmo_core.train.callbacks import (
    Callback,
    CheckpointerCallback,
    ConfigSaverCallback,
    EvaluatorCallback,
)
from olmo_core.train.train_module import (
    TransformerActivationCheckpointingConfig,
    TransformerTrainModuleConfig,
)
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

from open_instruct.config.sections import PreferenceDataSection, SFTDataSection
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.objectives.reward_model import RewardLossSection
from open_instruct.olmo_core_train_modules import (
    RewardModelTrainModule,
    SFTTrainModule,
    StartModel,
)
from open_instruct.parallel.layout import resolve_layout
from open_instruct.parallel.process import find_gpus_per_node, stop_process
from open_instruct.training.optim.optimizers import SkipStepHistory
from tests.ranks.fork_server import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "olmo_core"
COMPARED = ("loss", "grad_norm", "train/CE loss")
LENGTH = 192
EVALUATED_IDS = [[5, 9, 2, 7, 3, 40, 41, 42]]


@dataclass
class StepNotes(Callback):
    """Notes what is compared of each step, as the callbacks of a user's own get it."""

    rows: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "eval/ids/loss" in metrics:
            self.evaluations.append(metrics["eval/ids/loss"])
        row = {name: metrics[name] for name in COMPARED if name in metrics}
        if "loss" in row:  # the Trainer logs what is recorded after a step by itself
            self.rows.append({"step": step, **row})


def run_each(cases: list[dict[str, Any]], ports: list[int]) -> list[list[dict[str, float]]]:
    """What each case notes; each has a process group, and so a port, of its own."""
    results = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(run_example(**case))
    return results


def run_example(
    name: str, arguments: list[str], stop_after: int | None = None
) -> list[dict[str, float]]:
    """Train as the script does, or until a step before its last one."""
    train.prepare_training_environment(backend="cpu:gloo", shared_filesystem=True)
    script = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    trainer: train.Trainer = script["build_trainer"](*arguments)
    if stop_after is not None:
        trainer.hard_stop = train.Duration.steps(stop_after)
    notes = StepNotes()
    trainer.add_callback("notes", notes)
    trainer.fit()
    stop_process()
    return notes.rows


class MeanLoss(Evaluator):
    """The mean cross-entropy of a few tokens."""

    def reset_metrics(self) -> None:
        self.loss = torch.zeros(())

    def update_metrics(self, batch: dict[str, Any], ce_loss: Any, logits: Any) -> None:
        self.loss = ce_loss.sum() / (len(EVALUATED_IDS[0]) - 1)

    def compute_metrics(self) -> dict[str, torch.Tensor]:
        return {"loss": self.loss}


def train_at_home(
    folder: str,
    rows: str,
    tokenizer: str,
    output_dir: str,
    num_epochs: int,
    is_stock: bool = False,
    **degrees: int,
) -> dict[str, Any]:
    """SFT from a checkpoint of OLMo-core, which the Trainer loads; its steps are such checkpoints.

    :param is_stock: whether it is sharded, and recomputed, by configs of OLMo-core's own.
    :param degrees: of the layout, in place of its defaults.

    Returns the noted rows, the evaluations, and the length of the skip-step optimizer's history.
    """
    train.prepare_training_environment(backend="cpu:gloo", shared_filesystem=True)
    start = StartModel.open(folder)
    module_config = TransformerTrainModuleConfig(
        optim=SkipStepAdamWConfig(lr=1e-4, weight_decay=0.0),
        scheduler=ConstantWithWarmup(warmup=0),
        max_grad_norm=1.0,
        max_sequence_length=LENGTH,
        rank_microbatch_size=2 * LENGTH,
    )
    sharding: dict[str, Any] = {"param_dtype": "float32"}
    if is_stock:
        module_config.dp_config = TransformerDataParallelConfig(
            name=DataParallelType.fsdp, param_dtype=DType.float32
        )
        module_config.ac_config = TransformerActivationCheckpointingConfig()
    else:
        sharding["layout"] = resolve_layout(find_gpus_per_node(), **degrees)
    module = SFTTrainModule.from_config(module_config, start.build(), **sharding)
    data = SFTDataSection(mixer_list=[rows, "1.0"], max_seq_length=LENGTH)
    opened_tokenizer = load_tokenizer(tokenizer)
    loader = module.build_data_loader(data, opened_tokenizer, rows_per_step=8, work_dir=output_dir)
    config = train.TrainerConfig(
        save_folder=output_dir,
        load_path=f"{folder}/model_and_optim",
        load_trainer_state=False,
        load_optim_state=False,
        max_duration=train.Duration.epochs(num_epochs),
        metrics_collect_interval=1,
        async_bookkeeping=False,
    )
    notes = StepNotes()
    evaluator = MeanLoss(name="ids", batches=[{"input_ids": torch.tensor(EVALUATED_IDS)}])
    optim: Any = module.optim
    config.callbacks |= {
        "checkpointer": CheckpointerCallback(save_interval=100, save_async=False),
        "config_saver": ConfigSaverCallback(),
        "evaluator": EvaluatorCallback(
            evaluators=[evaluator], eval_interval=None, eval_on_finish=not degrees
        ),
        "history": SkipStepHistory(optim),
        "notes": notes,
    }
    trainer = config.build(module, loader)
    saver: Any = trainer.callbacks["config_saver"]
    saver.config = json.loads(Path(folder, "config.json").read_text())
    trainer.fit()
    module.export(start, Path(output_dir, "hf_model"), data=data, tokenizer=opened_tokenizer)
    stop_process()
    return {
        "rows": notes.rows,
        "evaluations": notes.evaluations,
        "history": len(optim._losses),
    }


def export_reward_model(folder: str, out: str) -> None:
    """Export a reward model before its first step, with the head that its start model drew."""
    train.prepare_training_environment(backend="cpu:gloo", shared_filesystem=True)
    start = StartModel.open(folder, head="score", seed=7)
    module = RewardModelTrainModule(
        loss=RewardLossSection(),
        model=start.build(),
        optim=AdamWConfig(),
        max_sequence_length=LENGTH,
        rank_microbatch_size=2 * LENGTH,
    )
    start.load_into(module.model)
    module.export(
        start,
        out,
        data=PreferenceDataSection(mixer_list=["rows.jsonl", "1.0"]),
        tokenizer=load_tokenizer(folder),
    )
