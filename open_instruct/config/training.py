"""The sections that the configuration of every run has, whatever its objective, and the record of
its backend.

A backend holds the shards of a run. `--backend` names an entry point of an installed package in the
group `open_instruct.backends`, whose object is a `BackendRecord`; ours stand in pyproject.toml.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from open_instruct.config import sections
from open_instruct.config.lora import LoRASection
from open_instruct.config.parser import nearest
from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.run_sections import LoggingSection, RunSection
from open_instruct.core.errors import InputError
from open_instruct.core.metrics import HELD_OUT_PREFIX
from open_instruct.core.shard_layout import ShardLayout

GROUP = "open_instruct.backends"
KEPT_ON_ONE_PROCESS = ("single_gpu_mode", "backend", "deepspeed_stage")

ConfigT = TypeVar("ConfigT", bound="LearnerConfig")


@dataclass(kw_only=True)
class LearnerConfig:
    """The sections that any learner reads, GRPO's too.

    A subclass adds its own, and may extend these.
    """

    model: sections.ModelSection
    data: sections.DataSection | PromptDataSection
    optim: sections.OptimizerSection
    parallel: sections.ParallelSection
    memory: sections.MemorySection
    run: RunSection
    logging: LoggingSection
    lora: LoRASection = field(default_factory=LoRASection)

    @property
    def adapters(self) -> LoRASection | None:
        """The flags of the adapters where only adapters are trained; otherwise None."""
        return self.lora if self.lora.use_lora else None

    @property
    def frozen_as(self) -> str:
        """The precision of a start model that is not trained, on which all that it computes
        depends.
        """
        return f"{self.model.param_dtype}-nf4" if self.lora.use_qlora else self.model.param_dtype

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        """The metrics that say how good the policy is, by name or pattern; those behind `eval/` are
        of held-out rows.

        An objective that has others says so in its config, and the table of metrics says which
        values are better.
        """
        return with_held_out("loss")

    def __post_init__(self) -> None:
        backend_named(self.parallel.backend).settle(self)


@dataclass(kw_only=True)
class TrainingConfig(LearnerConfig):
    """The sections that the walk of an offline run reads."""

    data: sections.DataSection
    optim: sections.OptimSection
    parallel: sections.RanksSection


def with_held_out(*names: str) -> tuple[str, ...]:
    """The metrics of training with those names, and the same of held-out rows."""
    return (*names, *(f"{HELD_OUT_PREFIX}{name}" for name in names))


def on_one_process(config: ConfigT) -> ConfigT:
    """The config for one process: the same mathematics without shards, and without compilation."""
    kept = {name: getattr(config.parallel, name) for name in KEPT_ON_ONE_PROCESS}
    return replace(
        config,
        parallel=type(config.parallel)(**kept),
        memory=replace(config.memory, compile_model=False, activation_memory_budget=1.0),
    )


class BackendRecord(Protocol):
    """All that is known of a backend without torch; only `build` loads torch."""

    def settle(self, config: LearnerConfig) -> None:
        """Fill in flags that were not given and whose default depends on the backend."""

    def problems(self, config: LearnerConfig) -> Iterator[str]:
        """Flags that cannot go together, and flags that the backend lacks: a sentence with a remedy
        for each.
        """

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        """A sentence for each given flag that the backend does not read."""

    def refuse_unfit(self) -> None:
        """:raises InputError: a library that it needs is not installed, or not in a version that
        will do.
        """

    def layout(
        self, parallel: sections.ParallelSection, gpus_per_node: Sequence[int]
    ) -> ShardLayout:
        """Which ranks share parameters, and which hold copies.

        :raises InputError: the flags cannot work on these nodes.
        """

    def sharing(self, parallel: sections.ParallelSection, layout: ShardLayout) -> str:
        """The layout in a few words, for people: `2 copies of the model, each split over 4`."""

    def planned(self, config: LearnerConfig) -> Any:
        """The backend as a plan sees it: a `planning.plan.Backend`."""

    def build(self, pretrained: Any, *, run: Any, config: LearnerConfig, num_steps: int) -> Any:
        """The `learner.backend.Backend` of a run, with the weights of `pretrained` in place.

        Collective.
        """


@cache
def backend_named(name: str) -> BackendRecord:
    """:raises InputError: no installed backend has this name."""
    known = {each.name: each for each in entry_points(group=GROUP)}
    if not known:
        raise InputError(
            "no backend is installed: run `make install`, or `pip install .`, once more",
            kind="missing_package",
        )
    if name not in known:
        raise InputError(
            f"--backend {name}: takes {' or '.join(sorted(known))}{nearest(name, known)}",
            kind="bad_value",
        )
    record: BackendRecord = known[name].load()
    return record
