"""Supervised tuning in OLMo-core's own Trainer, on conversations.

torchrun --nproc_per_node 8 examples/olmo_core/sft.py MODEL_DIR chats.jsonl OUT
"""

import sys

import torch
from olmo_core import train
from olmo_core.optim import AdamWConfig, ConstantWithWarmup
from olmo_core.train.callbacks import CheckpointerCallback, ConsoleLoggerCallback

from open_instruct.config.sections import SFTDataSection
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.olmo_core_train_modules import SFTTrainModule, StartModel

LENGTH = 192


def build_trainer(folder: str, rows: str, output_dir: str) -> train.Trainer:
    """The Trainer of five steps of eight conversations, with a checkpoint after the third."""
    start = StartModel.open(folder)
    module = SFTTrainModule(
        model=start.build(),
        param_dtype="float32",
        optim=AdamWConfig(lr=1e-4, weight_decay=0.0),
        scheduler=ConstantWithWarmup(warmup=2),
        max_grad_norm=1.0,
        max_sequence_length=LENGTH,
        rank_microbatch_size=2 * LENGTH,  # two conversations of full length
    )
    start.load_into(module.model)
    loader = module.build_data_loader(
        SFTDataSection(mixer_list=[rows, "1.0"], max_seq_length=LENGTH),
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
    config.callbacks["console_logger"] = ConsoleLoggerCallback(metrics=["train/*", "grad_norm"])
    return config.build(module, loader)


if __name__ == "__main__":
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
    train.prepare_training_environment(backend=backend, shared_filesystem=True)
    build_trainer(*sys.argv[1:]).fit()
    train.teardown_training_environment()
