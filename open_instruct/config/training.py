"""What the configuration of every offline run has, whatever it learns."""

from __future__ import annotations

from typing import Protocol

from open_instruct.config.sections import (
    DataSection,
    LoggingSection,
    MemorySection,
    ModelSection,
    OptimSection,
    ParallelSection,
    RunSection,
)


class TrainingConfig(Protocol):
    """The sections that the walk reads. Read-only, so that a section may be of a subclass."""

    @property
    def model(self) -> ModelSection: ...

    @property
    def data(self) -> DataSection: ...

    @property
    def optim(self) -> OptimSection: ...

    @property
    def parallel(self) -> ParallelSection: ...

    @property
    def memory(self) -> MemorySection: ...

    @property
    def run(self) -> RunSection: ...

    @property
    def logging(self) -> LoggingSection: ...
