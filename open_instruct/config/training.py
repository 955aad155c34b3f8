"""The sections that every run has, whatever its objective, and what it asks of its backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol, TypeVar

from open_instruct.config import sections, sharding_sections
from open_instruct.config.lora import LoRASection
from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.run_sections import LoggingSection, RunSection
from open_instruct.core.metrics import HELD_OUT_PREFIX
from open_instruct.core.shard_layout import ShardLayout

ConfigT = TypeVar("ConfigT", bound="LearnerConfig")


class BackendRecord(Protocol):
    """All that is known of a backend without torch; only `build` loads torch."""

    def default_values(self, config: LearnerConfig) -> Mapping[str, Any]:
        """The values of flags that were not given and whose default depends on the backend."""

    def problems(self, config: LearnerConfig) -> Iterator[str]:
        """Flags that cannot go together or that the backend lacks, each with a remedy."""

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        """A sentence for each given flag that the backend does not read."""

    def refuse_unfit(self) -> None:
        """:raises InputError: a library that it needs is missing, or in a version that fails."""

    def layout(
        self, parallel: sharding_sections.ParallelSection, gpus_per_node: Sequence[int]
    ) -> ShardLayout:
        """Which ranks share parameters, and which hold copies.

        :raises InputError: the flags cannot work on these nodes.
        """

    def sharing(self, parallel: sharding_sections.ParallelSection, layout: ShardLayout) -> str:
        """The layout in a few words, for people: `2 copies of the model, each split over 4`."""

    def make_planner(self, parallel: sharding_sections.ParallelSection) -> Any:
        """What the backend adds to a plan: a `planning.setting.BackendPlanner`."""

    def build(
        self,
        pretrained: Any,
        *,
        run: Any,
        config: LearnerConfig,
        num_steps: int,
    ) -> Any:
        """The `training.backend.Backend` of a run, with the weights of `pretrained` in place.

        Collective.
        """


@dataclass(kw_only=True)
class LearnerConfig:
    """The sections that any learner reads, GRPO's too.

    A subclass adds its own, and may extend these. It is whole once `parallel.resolve.resolve` has
    joined it with its backend: the parser gives the sections alone.
    """

    model: sections.ModelSection
    data: sections.DataSection | PromptDataSection
    optim: sections.OptimizerSection
    parallel: sharding_sections.ParallelSection
    memory: sharding_sections.MemorySection
    run: RunSection
    logging: LoggingSection
    lora: LoRASection = field(default_factory=LoRASection)
    backend_record: BackendRecord | None = field(default=None, repr=False, compare=False)

    @property
    def backend(self) -> BackendRecord:
        """What is known of the backend that `--backend` names."""
        assert self.backend_record is not None, (
            "sections alone: `resolve` joins them with their backend"
        )
        return self.backend_record

    @property
    def all_sections(self) -> list[Any]:
        """The sections, in the order of the fields."""
        return [value for value in vars(self).values() if is_dataclass(value)]

    @property
    def adapters(self) -> LoRASection | None:
        """The flags of the adapters where only adapters are trained; otherwise None."""
        return self.lora if self.lora.use_lora else None

    @property
    def reference_precision(self) -> str:
        """The precision of a start model that is not trained, which all it computes depends on."""
        return f"{self.model.param_dtype}-nf4" if self.lora.use_qlora else self.model.param_dtype

    @property
    def shares_prompts(self) -> bool:
        """Whether rows may share a prompt, by `--prefix_sharing` of whichever section has it."""
        values = [getattr(section, "prefix_sharing", "off") for section in self.all_sections]
        return any(value != "off" for value in values)

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        """The metrics that say how good the policy is, by name or pattern; those behind `eval/` are
        of held-out rows.

        An objective that has others says so in its config, and the table of metrics says which
        values are better.
        """
        return with_held_out("loss")


@dataclass(kw_only=True)
class TrainingConfig(LearnerConfig):
    """The sections that the walk of an offline run reads."""

    data: sections.DataSection
    optim: sections.OptimSection
    parallel: sharding_sections.RanksSection


def with_held_out(*names: str) -> tuple[str, ...]:
    """The metrics of training with those names, and the same of held-out rows."""
    return (*names, *(f"{HELD_OUT_PREFIX}{name}" for name in names))
