"""What the configuration of every run has, whatever it learns."""

from __future__ import annotations

from typing import Protocol

from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.sections import (
    DataSection,
    LoggingSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    OptimSection,
    RunSection,
    ShardingSection,
)


class LearnerConfig(Protocol):
    """The sections that any learner reads, GRPO's too. Read-only, so that a section may be of a subclass."""

    @property
    def model(self) -> ModelSection: ...

    @property
    def data(self) -> DataSection | PromptDataSection: ...

    @property
    def optim(self) -> OptimizerSection: ...

    @property
    def parallel(self) -> ShardingSection: ...

    @property
    def memory(self) -> MemorySection: ...

    @property
    def run(self) -> RunSection: ...

    @property
    def logging(self) -> LoggingSection: ...


class TrainingConfig(LearnerConfig, Protocol):
    """The sections that the walk of an offline run reads."""

    @property
    def data(self) -> DataSection: ...

    @property
    def optim(self) -> OptimSection: ...
