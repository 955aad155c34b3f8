"""GRPO in OLMo-core's own Trainer, on completions that another program has sampled and judged.

torchrun --nproc_per_node 8 examples/olmo_core/grpo.py MODEL_DIR completions.jsonl OUT
"""

import json
import sys
from pathlib import Path

import torch
from olmo_core import train
from olmo_core.optim import AdamWConfig, ConstantWithWarmup
from olmo_core.train.callbacks import CheckpointerCallback, ConsoleLoggerCallback

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.core.records import Document, RolloutSample, Span
from open_instruct.olmo_core_train_modules import GRPOTrainModule, StartModel


def read_sample(line: str) -> RolloutSample:
    """A completion: `{"prompt_ids", "completion_ids", "logprobs", "advantage"}`."""
    row = json.loads(line)
    ids = (*row["prompt_ids"], *row["completion_ids"])
    reply = Span(start=len(row["prompt_ids"]), stop=len(ids))
    return RolloutSample(
        document=Document(token_ids=ids, responses=(reply,)),
        engine_logprobs=tuple(row["logprobs"]),
        advantage=row["advantage"],
    )


def build_trainer(folder: str, completions: str, output_dir: str) -> train.Trainer:
    """The Trainer of five steps of eight completions, with a checkpoint after the third."""
    start = StartModel.open(folder)
    module = GRPOTrainModule(
        loss=PolicyLossSection(loss_fn="dapo", beta=0.05),
        temperature=0.7,
        response_length=24,
        model=start.build(),
        reference=start,
        param_dtype="float32",
        optim=AdamWConfig(lr=1e-4, weight_decay=0.0),
        scheduler=ConstantWithWarmup(warmup=2),
        max_grad_norm=1.0,
        max_sequence_length=60,
        rank_microbatch_size=120,  # tokens of a packed row
    )
    start.load_into(module.model)
    samples = [read_sample(line) for line in Path(completions).read_text().splitlines()]
    loader = module.build_data_loader(
        lambda step: samples[8 * step - 8 : 8 * step], num_steps=5, work_dir=output_dir
    )
    config = train.TrainerConfig(
        save_folder=output_dir,
        max_duration=train.Duration.steps(5),
        metrics_collect_interval=1,
        async_bookkeeping=False,  # over gloo its second thread hangs now and then
    )
    config.callbacks["checkpointer"] = CheckpointerCallback(save_interval=3, save_async=False)
    config.callbacks["console_logger"] = ConsoleLoggerCallback(metrics=["loss", "kl", "grad_norm"])
    return config.build(module, loader)


if __name__ == "__main__":
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
    train.prepare_training_environment(backend=backend, shared_filesystem=True)
    build_trainer(*sys.argv[1:]).fit()
    train.teardown_training_environment()
