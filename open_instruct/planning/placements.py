"""Where learners and engines stand on a set of GPUs, with the memory and the seconds of each phase.

    split    learners and engines have GPUs of their own, and one side may wait for the other
    shared   every GPU has a learner and an engine, which take turns
    mixed    learners take turns with the engines of their own GPUs; the others have engines alone,
             which go on while learners learn

Where they take turns, a step is: engines generate, while the learners' state is in host memory;
learners learn, while the engines have given up weights and cache; weights go to the engines; the
learners' state leaves again.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, Literal

from open_instruct.config.flags import spell_value
from open_instruct.config.grpo import GRPOConfig
from open_instruct.planning.engine_time import EngineWork
from open_instruct.planning.memory.parts import BUFFERS, CUDA, ENGINE, INTERPRETER, SCRATCH
from open_instruct.planning.memory.scratch import CONTEXT_BYTES
from open_instruct.planning.plan import Plan
from open_instruct.planning.setting import Setting
from open_instruct.planning.step_time import GIGA, LOADED_GB_S, step_time
from open_instruct.planning.subject.devices import CPU_CROSS_NODE_GB_S

Kind = Literal["split", "shared", "mixed"]

# Parts of a learner's memory that stay on the device while its state is on the host.
STAYS_AT_REST = (BUFFERS, SCRATCH, CUDA, INTERPRETER)
# Seconds in which an engine frees and takes its memory, and a learner frees its own; assumed.
SWITCH_S = 1.0
# GB/s from GPUs into memory of the host that processes share, and out of it; assumed.
HOST_GB_S = 8.0
# Of the prompts of later steps that may be begun in a turn, by --async_steps, the shares that are
# compared; and how much longer than the shortest a turn may be for the sake of fewer.
AHEAD_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ENOUGH = 1.02


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One way to place a run: its memory in each phase, and the seconds of each.

    Example: shared on one node of 8 GPUs, with engines of one GPU each, is
    `Placement(kind="shared", learners=(8,), engines=8, degree=1, …)`.
    """

    kind: Kind
    plan: Plan  # the learners'
    work: EngineWork
    learners: tuple[int, ...]  # of each node; 0 on a node of engines alone
    engines: int
    degree: int  # GPUs of an engine

    def set_flags(self, setting: Setting) -> Setting:
        """The setting of a run with the flags that place it so."""
        values: dict[str, Any] = {
            "placement": self.kind,
            "vllm_tensor_parallel_size": self.degree,
            "vllm_num_engines": 1 if self.kind == "shared" else self.engines,
        }
        if self.pauses_completions:
            values["prompts_ahead"] = self.prompts_ahead
        sizes = tuple(each for each in self.learners if each)
        return replace(setting, gpus_per_node=sizes).with_flags(values)

    @property
    def takes_turns(self) -> bool:
        return self.kind != "split"

    @property
    def num_gpus(self) -> int:
        """GPUs that have a learner, an engine or both."""
        num_engine_gpus = self.engines * self.degree
        if self.kind == "split":
            return sum(self.learners) + num_engine_gpus
        return max(sum(self.learners), num_engine_gpus)

    @property
    def is_async(self) -> bool:
        config = self.plan.setting.config
        return isinstance(config, GRPOConfig) and config.rollout.async_steps > 0

    @property
    def pauses_completions(self) -> bool:
        """Whether turns of all engines end with completions of later steps on their way."""
        return self.is_async and self.kind == "shared"

    # Memory of the GPU that needs most, by phase.

    @cached_property
    def resting_bytes(self) -> int:
        """What a learner has on its GPU while its state is on the host."""
        parts = self._resident_parts
        # A library's own buffers move too; a critic's are counted with the critic.
        own_bytes = self.plan.memory.buffer_bytes
        return sum(parts.get(label, 0) for label in STAYS_AT_REST) - own_bytes

    @cached_property
    def moved_bytes(self) -> int:
        """The state of a learner, which goes to the host and comes back in every step."""
        parts = self._resident_parts
        return sum(parts.values()) - parts.get(ENGINE, 0) - self.resting_bytes

    @cached_property
    def _resident_parts(self) -> dict[str, int]:
        """What a learner has on its device between two steps."""
        memory = self.plan.memory
        return memory.resident_parts(memory.idle_gradient_bytes)

    @cached_property
    def cache_bytes(self) -> int:
        """What is left on a GPU for an engine's keys and values; below 0: too little for it."""
        beside = self.resting_bytes if self.takes_turns else 0
        return self.work.find_cache_bytes(self.degree, beside_bytes=beside)

    @cached_property
    def num_seqs(self) -> int:
        """Sequences of full length that an engine has at once."""
        return self.work.count_seqs(self.degree, self.cache_bytes)

    @cached_property
    def phase_bytes(self) -> dict[str, int]:
        """Bytes on a GPU at the worst moment of each phase."""
        memory_bytes = self.plan.setting.device.memory_bytes
        engine_bytes = int(self.work.memory_share * memory_bytes)
        learn_bytes = max(
            phase.total_bytes for phase in self.plan.phases if phase.name != "weight sync"
        )
        if not self.takes_turns:
            return {"generate": engine_bytes, "learn": self.plan.peak.total_bytes}
        bucket_bytes = 2 * self.plan.workload.sync_bucket_bytes
        return {
            "generate": engine_bytes,
            "learn": learn_bytes + CONTEXT_BYTES,  # of the engine, which has given up the rest
            "sync": self.resting_bytes
            + self.moved_bytes
            + self.work.weight_bytes // self.degree
            + CONTEXT_BYTES
            + bucket_bytes,
        }

    @property
    def fits(self) -> bool:
        memory_bytes = self.plan.setting.device.memory_bytes
        return self.num_seqs > 0 and max(self.phase_bytes.values()) <= memory_bytes

    # Seconds.

    @cached_property
    def phase_s(self) -> dict[str, float]:
        """Seconds of each phase of a step, whether or not one hides another."""
        seconds = {"generate": self._generate_s, "learn": self._learn_s, "sync": self._sync_s}
        if self.takes_turns:
            seconds["move"] = 2 * self.moved_bytes / (LOADED_GB_S * GIGA) + SWITCH_S
        return seconds

    @property
    def seconds_by_metric(self) -> dict[str, float]:
        """`phase_s`, by the names of a run's metrics without `time/`."""
        names = {"learn": "train", "move": "switch"}
        return {names.get(name, name): seconds for name, seconds in self.phase_s.items()}

    @property
    def _generate_s(self) -> float:
        return self._count_generate_s(self.prompts_ahead)

    def _count_generate_s(self, prompts_ahead: int) -> float:
        return self.work.count_seconds(
            self.engines,
            self.degree,
            num_seqs=max(1, self.num_seqs),
            prompts_ahead=prompts_ahead,
        )

    # Completions of later steps.

    @cached_property
    def prompts_ahead(self) -> int:
        """Prompts of later steps that engines may begin before a step's completions are whole.

        Where all engines take turns, the fewest with which a turn is as short as with more: the
        fewer, the newer the weights of what is learned, and the less has to be computed again.
        """
        config = self.plan.setting.config
        assert isinstance(config, GRPOConfig)
        if config.rollout.prompts_ahead is not None or not self.pauses_completions:
            return config.rollout.max_prompts_ahead
        most = config.rollout.max_prompts_ahead
        numbers = sorted({ceil(most * share) for share in AHEAD_SHARES})
        seconds = {number: self._count_generate_s(number) for number in numbers}
        enough_s = ENOUGH * min(seconds.values())
        return next(number for number in numbers if seconds[number] <= enough_s)

    @property
    def older_fraction(self) -> float:
        """The share of a step's tokens that engines make before the turn that ends with it."""
        trace = self.work.trace_engine(
            self.engines, num_seqs=max(1, self.num_seqs), prompts_ahead=self.prompts_ahead
        )
        return trace.older_fraction

    @property
    def saved_wait_s(self) -> float:
        """Seconds by which a turn is shorter as prompts of later steps are begun in it."""
        return self._count_generate_s(0) - self._count_generate_s(self.prompts_ahead)

    @cached_property
    def _learn_s(self) -> float:
        setting = self.plan.setting
        exchanges = [each for each in self.plan.exchanges if each.axis != "sync"]
        time = step_time(
            setting.shape,
            self.plan.layout,
            self.plan.workload,
            setting.device,
            exchanges,
            setting.mfu,
        )
        return time.step_s

    @cached_property
    def _sync_s(self) -> float:
        """Weights to the engines; those of other GPUs are gathered where engines take turns.

        They go through the host where only some do.
        """
        if not self.takes_turns:
            return self.plan.syncs[0].seconds if self.plan.syncs else 0.0
        device = self.plan.setting.device
        if self.kind == "mixed":
            gb_s = HOST_GB_S if len(self.learners) == 1 else CPU_CROSS_NODE_GB_S
            return self.work.weight_bytes / (gb_s * GIGA)
        num_nodes = sum(each > 0 for each in self.learners)
        gb_s = device.in_node_gb_s if num_nodes == 1 else device.cross_node_gb_s
        return self.work.weight_bytes / (gb_s * GIGA)

    @property
    def step_s(self) -> float:
        """Seconds of a whole step, at least.

        Split, learners and engines work at once if steps are asynchronous. Mixed, the engines of
        other GPUs then go on while the learners' own rest.
        """
        seconds = self.phase_s
        busy_s = seconds["learn"] + seconds["sync"] + seconds.get("move", 0.0)
        if not self.is_async or self.kind == "shared":
            return seconds["generate"] + busy_s
        if self.kind == "split":
            return max(seconds["generate"], seconds["learn"]) + seconds["sync"]
        share = sum(self.learners) / (self.engines * self.degree)
        return max(busy_s, seconds["generate"] + share * busy_s)

    @property
    def idle_share(self) -> float:
        """The share of a step in which the GPUs of the side that is quicker wait, when split."""
        if self.kind != "split":
            return 0.0
        waits_s = self.step_s - min(self.phase_s["generate"], self.phase_s["learn"])
        return waits_s / self.step_s

    @property
    def flags(self) -> str:
        """The flags of the run that place it so."""
        learners = [each for each in self.learners if each]
        words = f"--num_learners_per_node {spell_value(learners)}"
        if self.takes_turns:
            words = f"--placement {self.kind} {words}"
        if self.kind != "shared":
            words += f" --vllm_num_engines {self.engines}"
        if self.degree > 1:
            words += f" --vllm_tensor_parallel_size {self.degree}"
        return words


def find_placement(plan: Plan) -> Placement:
    """The placement of a GRPO run that was planned, as its own flags have it."""
    setting = plan.setting
    config, work = find_engine_work(setting, tokens_per_second=None)
    return Placement(
        kind=config.fleet.placement if config.fleet.placement != "auto" else "split",
        plan=plan,
        work=work,
        learners=setting.gpus_per_node,
        engines=plan.workload.num_engines,
        degree=config.fleet.vllm_tensor_parallel_size,
    )


def find_engine_work(
    setting: Setting, *, tokens_per_second: float | None
) -> tuple[GRPOConfig, EngineWork]:
    """The flags of a GRPO run, and what its engines have to do."""
    config = setting.config
    assert isinstance(config, GRPOConfig)
    work = EngineWork.of(
        config,
        setting.shape,
        setting.device,
        mfu=setting.mfu,
        tokens_per_second=tokens_per_second,
    )
    return config, work
