"""Flags, steps that are timed, and what is written of them, of TRL's trainers of offline
objectives.

Each rank writes OUT/rank{N}.json: seconds, real tokens and loss of every step, the peak of its
memory, how long it took until the first step, and its processor time at the end of each; with
--offload the peaks before that step and since.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from datasets import load_dataset
from harness.memory import forget_peak, memory_bytes
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

# Of every trainer: one learning rate throughout, each step logged, and nothing recomputed or saved.
PLAIN = {
    "bf16": False,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class StepClock(TrainerCallback):
    """Wall time and loss of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.processor_stamps: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began_s = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began_s)
        self.processor_stamps.append(time.process_time())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class PeaksOfMemory(TrainerCallback):
    """The most that this process held before its first step, and since."""

    def __init__(self) -> None:
        self.bytes = {"before": 0, "steps": 0}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.bytes["before"]:
            (self.bytes["before"],) = memory_bytes("VmHWM")
            forget_peak()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        (self.bytes["steps"],) = memory_bytes("VmHWM")


def parsed(strength: str) -> argparse.Namespace:
    """The flags of all of them; `strength` is the one that each has a name of its own for."""
    parser = argparse.ArgumentParser()
    for flag in ("model", "rows", "out"):
        parser.add_argument(f"--{flag}", type=Path, required=True)
    for flag in ("batch", "accumulation", "steps", "max_length"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--lora_r", type=int, help="with peft, which must be on the path")
    parser.add_argument(
        "--load_in_4bit", action="store_true", help="with bitsandbytes, which must be on the path"
    )
    parser.add_argument("--zero_stage", type=int, help="with DeepSpeed, which must be on the path")
    parser.add_argument(
        "--offload", action="store_true", help="accelerate's FSDP2 with shards in host memory"
    )
    for flag in (strength, "learning_rate"):
        parser.add_argument(f"--{flag}", type=float, required=True)
    return parser.parse_args()


def with_deepspeed(args: argparse.Namespace) -> dict[str, Any]:
    """What `TrainingArguments` are given: torch's AdamW, and nothing that is compiled first.

    Accelerate takes DeepSpeed on accelerators alone, so it is told of gloo where it looks for
    theirs.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    state = importlib.import_module("accelerate.state")
    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.NO)
    zero = {"stage": args.zero_stage}
    settings = {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return {"deepspeed": settings | sizes}


def with_offload() -> dict[str, Any]:
    """What `TrainingArguments` are given: FSDP2 with torch's `CPUOffloadPolicy`.

    Accelerate takes FSDP on accelerators alone too. Without one memory cannot be pinned, which it
    would be.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state, utils = (importlib.import_module(f"accelerate.{name}") for name in ("state", "utils"))
    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU)

    def set_cpu_offload(plugin: Any) -> None:
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    utils.FullyShardedDataParallelPlugin.set_cpu_offload = set_cpu_offload
    return {"fsdp": True, "fsdp_config": {"version": 2, "cpu_offload": True}}


def train_timed(
    args: argparse.Namespace,
    trainer_class: Any,
    config_class: Any,
    masks: Sequence[str],
    *,
    own: Mapping[str, Any],
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained,
    **trainers_own: Any,
) -> None:
    """Train and write what each step took.

    Args:
        masks: those of a batch whose ones are real tokens.
        own: what this trainer's config has and others do not.
        load: from a folder to a model with the head that is trained.
        trainers_own: what this trainer is given and others are not.
    """
    torch.manual_seed(0)
    clock, peaks = StepClock(), PeaksOfMemory()
    sharded = {} if args.zero_stage is None else with_deepspeed(args)
    if args.offload:
        sharded = with_offload()
    began_s = time.perf_counter()
    trainer = trainer_class(
        model=load(args.model, dtype=torch.float32),
        args=config_class(
            output_dir=str(args.out),
            use_cpu=not sharded,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation,
            max_steps=args.steps,
            max_length=args.max_length,
            learning_rate=args.learning_rate,
            **PLAIN,
            **own,
            **sharded,
        ),
        train_dataset=load_dataset("json", data_files=str(args.rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock, peaks] if args.offload else [clock],
        **trainers_own,
    )
    collate = trainer.data_collator
    num_tokens: list[int] = []

    def counting(examples: Any) -> Any:
        batch = collate(examples)
        num_tokens.append(sum(int(batch[mask].sum()) for mask in masks))
        return batch

    # Reference log-probs first, so that only training batches are counted.
    trainer.get_train_dataloader()
    trainer.data_collator = counting
    trainer.train()
    per_step = [
        sum(num_tokens[step * args.accumulation : (step + 1) * args.accumulation])
        for step in range(args.steps)
    ]
    result = {"seconds": clock.seconds, "num_tokens": per_step, "losses": clock.losses}
    (peak_bytes,) = memory_bytes("VmHWM")
    result |= {
        "load_s": clock.began_s - began_s,
        "peak_gib": peak_bytes / 2**30,
        "processor_stamps": clock.processor_stamps,
    }
    result |= {"peak_bytes": peaks.bytes}
    (args.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
