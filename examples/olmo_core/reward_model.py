"""A reward model in OLMo-core's own Trainer, on preference pairs.

torchrun --nproc_per_node 8 examples/olmo_core/reward_model.py MODEL_DIR pairs.jsonl OUT
"""

import sys

import torch
from olmo_core import train
from olmo_core.optim import AdamWConfig, ConstantWithWarmup
from olmo_core.train.callbacks import CheckpointerCallback, ConsoleLoggerCallback

from open_instruct.config.sections import PreferenceDataSection
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.objectives.reward_model import RewardLossSection
from open_instruct.olmo_core_train_modules import RewardModelTrainModule, StartModel

LENGTH = 192


def build_trainer(folder: str, rows: str, output_dir: str) -> train.Trainer:
    """The Trainer of five steps of eight pairs, with a checkpoint after the third."""
    start = StartModel.open(folder, head="score", seed=42)  # a head that is new
    module = RewardModelTrainModule(
        loss=RewardLossSection(),
        model=start.build(),
        param_dtype="float32",
        optim=AdamWConfig(lr=1e-4, weight_decay=0.0),
        scheduler=ConstantWithWarmup(warmup=2),
        max_grad_norm=1.0,
        max_sequence_length=LENGTH,
        rank_microbatch_size=4 * LENGTH,  # two pairs of full length
    )
    start.load_into(module.model)
    loader = module.build_data_loader(
        PreferenceDataSection(mixer_list=[rows, "1.0"], max_seq_length=LENGTH),
        load_tokenizer(folder),
        rows_per_step=8,
        work_dir=output_dir,
    )
    config = train.TrainerConfig(
        save_folder=output_dir,
        max_duration=train.Duration.steps(5),
        metrics_collect_interval=1,
        async_bookkeeping=False,  # over gloo its second thread hangs now and then
    )
    config.callbacks["checkpointer"] = CheckpointerCallback(save_interval=3, save_async=False)
    config.callbacks["console_logger"] = ConsoleLoggerCallback(metrics=["loss", "rewards/*"])
    return config.build(module, loader)


if __name__ == "__main__":
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
    train.prepare_training_environment(backend=backend, shared_filesystem=True)
    build_trainer(*sys.argv[1:]).fit()
    train.teardown_training_environment()
