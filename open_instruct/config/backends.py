"""Who can hold the shards of a run: what `--backend` names, as it is asked before there is a model.

Which there are `config/installed_backends.py` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from open_instruct.config.installed_backends import installed_backend
from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.records import ShardLayout


class BackendRecord(Protocol):
    """All that is known of a backend without torch, which `build` alone loads."""

    def settle(self, config: LearnerConfig) -> None:
        """Give flags that were left alone, and whose default is its own, their value."""

    def problems(self, config: LearnerConfig) -> Iterator[str]:
        """What its flags and the others ask of each other, and what it does not have: a sentence with a remedy each."""

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        """Flags that it does not read."""

    def refuse_unfit(self) -> None:
        """:raises InputError: a library that it needs is not installed, or not in a version that will do."""

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        """Who shares what with whom.

        :raises InputError: the flags cannot work on these nodes.
        """

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        """The same in a few words, for people: `2 x 4 (replicas x shard degree)`."""

    def planned(self, config: LearnerConfig) -> Any:
        """What a plan asks of it: a `planning.plan.Backend`."""

    def build(self, pretrained: Any, *, run: Any, config: LearnerConfig, num_steps: int) -> Any:
        """The `learner.backend.Backend` of a run, with the weights of `pretrained` in place. Collective."""


def backend_named(name: str) -> BackendRecord:
    """:raises InputError: none that is installed has this name."""
    record: BackendRecord = installed_backend(name)
    return record
