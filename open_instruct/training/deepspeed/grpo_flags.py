"""The flags of `grpo_fast.py`: those of GRPO, from where --backend deepspeed is set."""

from dataclasses import dataclass

from open_instruct.config.fleet_sections import LearnerParallelSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.sections import flag


@dataclass(kw_only=True)
class ZeroLearnerSection(LearnerParallelSection):
    """Sharding of GRPO's learners, by DeepSpeed unless another backend is named."""

    backend: str = flag("who holds the shards and steps the optimizer", "deepspeed")


@dataclass(kw_only=True)
class GRPOFastConfig(GRPOConfig):
    """Train a policy on verifiable rewards: vLLM engines generate, learners on DeepSpeed train,
    weights flow back.

    Examples:
        python open_instruct/grpo_fast.py configs/grpo/tiny_cpu_deepspeed.yaml --output_dir
            runs/zero
    """

    parallel: ZeroLearnerSection
