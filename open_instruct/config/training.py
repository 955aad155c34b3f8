"""The sections that the configuration of every run has, whatever its objective."""

from dataclasses import dataclass, field

from open_instruct.config.installed_backends import installed_backend
from open_instruct.config.lora import LoRASection
from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.sections import (
    DataSection,
    LoggingSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    OptimSection,
    ParallelSection,
    RanksSection,
    RunSection,
)


@dataclass(kw_only=True)
class LearnerConfig:
    """The sections that any learner reads, GRPO's too. A subclass adds its own, and may extend these."""

    model: ModelSection
    data: DataSection | PromptDataSection
    optim: OptimizerSection
    parallel: ParallelSection
    memory: MemorySection
    run: RunSection
    logging: LoggingSection
    lora: LoRASection = field(default_factory=LoRASection)

    @property
    def adapters(self) -> LoRASection | None:
        """The flags of the adapters where only adapters are trained; otherwise None."""
        return self.lora if self.lora.use_lora else None

    def __post_init__(self) -> None:
        installed_backend(self.parallel.backend).settle(self)


@dataclass(kw_only=True)
class TrainingConfig(LearnerConfig):
    """The sections that the walk of an offline run reads."""

    data: DataSection
    optim: OptimSection
    parallel: RanksSection
