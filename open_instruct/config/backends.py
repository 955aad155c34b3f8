"""The record of a backend, which holds the shards of a run: what `--backend` names, before there is a model.

`config/installed_backends.py` finds the installed ones.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from open_instruct.config.installed_backends import installed_backend
from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.shard_layout import ShardLayout


class BackendRecord(Protocol):
    """All that is known of a backend without torch; only `build` loads torch."""

    def settle(self, config: LearnerConfig) -> None:
        """Fill in flags that were not given and whose default depends on the backend."""

    def problems(self, config: LearnerConfig) -> Iterator[str]:
        """Flags that cannot go together, and flags that the backend lacks: a sentence with a remedy for each."""

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        """A sentence for each given flag that the backend does not read."""

    def refuse_unfit(self) -> None:
        """:raises InputError: a library that it needs is not installed, or not in a version that will do."""

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        """Which ranks share parameters, and which hold copies.

        :raises InputError: the flags cannot work on these nodes.
        """

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        """The layout in a few words, for people: `2 x 4 (replicas x shard degree)`."""

    def planned(self, config: LearnerConfig) -> Any:
        """The backend as a plan sees it: a `planning.plan.Backend`."""

    def build(self, pretrained: Any, *, run: Any, config: LearnerConfig, num_steps: int) -> Any:
        """The `learner.backend.Backend` of a run, with the weights of `pretrained` in place. Collective."""


def backend_named(name: str) -> BackendRecord:
    """:raises InputError: no installed backend has this name."""
    record: BackendRecord = installed_backend(name)
    return record
