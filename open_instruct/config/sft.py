"""The whole configuration of a supervised run, and what must hold between its flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.sections import SFTOptimSection
from open_instruct.config.training import TrainingConfig
from open_instruct.config.validation import refuse, training_problems, training_warnings


@dataclass(kw_only=True)
class SFTConfig(TrainingConfig):
    """Train a model on conversations, every assistant turn of them, sharded as HSDP, and export it."""

    examples: ClassVar[tuple[str, ...]] = (
        "torchrun --nproc_per_node 8 open_instruct/sft.py configs/sft/olmo3_7b_8gpu.yaml --output_dir runs/olmo3_sft",
        "open-instruct sft --model_name_or_path MODEL_DIR --mixer_list chats.jsonl 1.0 --output_dir runs/warm",
    )

    optim: SFTOptimSection


def validate_sft(config: SFTConfig) -> list[str]:
    """Check everything that the flags alone can tell, and return warnings.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    refuse(training_problems(config))
    return list(training_warnings(config))
