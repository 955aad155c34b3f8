"""A whole plan: the layout, memory, traffic and time of a run on given machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from open_instruct.config.flags import spell_value
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.sections import OptimSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError, refuse_first
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import (
    check_experts,
    check_feed_forward,
    check_heads,
    divisors,
)
from open_instruct.planning.exchanges import Exchange
from open_instruct.planning.memory.block import BLOCK_MODULES
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.phases import Phase, find_worst, memory_by_phase
from open_instruct.planning.memory.sync_buckets import sync_buckets
from open_instruct.planning.setting import Setting
from open_instruct.planning.step_time import ON_THE_PATH, StepTime, SyncCost, step_time, sync_costs
from open_instruct.planning.subject.build_workload import RunConfig
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import Workload, is_wrapped
from open_instruct.planning.traffic import weight_sync_traffic

# The share of a GPU that advice leaves free, and the share that --activation_checkpointing auto
# leaves free.
ROOM = 0.05
AUTO_ROOM = 0.1
# Smaller microbatches run smaller products: they must save more arithmetic than a plan is off.
WORTH_A_CUT = 1.02
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory, traffic and time of a run in one setting; the memory is the neediest rank's.

    `is_chosen`: --activation_checkpointing was auto, and the planner has chosen.
    """

    setting: Setting
    layout: ShardLayout
    workload: Workload
    memory: MemoryModel
    phases: tuple[Phase, ...]
    is_chosen: bool = False

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def headroom_bytes(self) -> int:
        """The memory of a GPU minus the peak; below 0 where the run does not fit."""
        return self.setting.device.memory_bytes - self.peak.total_bytes

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    @property
    def has_room(self) -> bool:
        """Whether it fits with a margin for what plans do not count: fragmentation, libraries."""
        return self.leaves(ROOM)

    def leaves(self, share: float) -> bool:
        """Whether this share of a GPU stays free."""
        return self.headroom_bytes >= share * self.setting.device.memory_bytes

    @property
    def models(self) -> list[MemoryModel]:
        """The policy, and the critic where there is one."""
        critic = self.memory.critic
        if critic is None:
            return [self.memory]
        return [self.memory, critic]

    @cached_property
    def host(self) -> Phase:
        """The host memory of each GPU's process."""
        parts = (Counter(model.host_parts()) for model in self.models)
        return find_worst("host", [sum(parts, Counter[str]())])

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states: the least that a run needs."""
        return sum(sum(model.state_bytes()) for model in self.models)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All communication of one rank in a step."""
        exchanges: list[Exchange] = []
        for model in self.models:
            exchanges += self.setting.backend.exchanges(model)
        if self.workload.num_engines:
            buckets = sync_buckets(self.setting.shape, self.layout, self.workload)
            exchanges += weight_sync_traffic(buckets, self.workload)
        return tuple(exchanges)

    @cached_property
    def syncs(self) -> tuple[SyncCost, ...]:
        """What a weight sync costs: of all weights, then of shares of them that have changed.

        Empty without engines, and through a folder, whose time is not known.
        """
        if not self.workload.num_engines or self.workload.sync_backend == "files":
            return ()
        shape = self.setting.shape
        device = self.setting.device
        return tuple(sync_costs(shape, self.layout, self.workload, device, self.exchanges))

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sends in a step."""
        return sum(exchange.sent_bytes for exchange in self.exchanges)

    @cached_property
    def time(self) -> StepTime:
        """A lower bound of one step."""
        setting = self.setting
        return step_time(
            setting.shape, self.layout, self.workload, setting.device, self.exchanges, setting.mfu
        )

    @property
    def blocking_groups(self) -> list[str]:
        """The groups whose exchanges arithmetic waits for."""
        axes = {exchange.axis for exchange in self.exchanges if exchange.wire_bytes}
        return [name for axis, name in ON_THE_PATH.items() if axis in axes]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks learn from in a step, where rows have their full length."""
        config = self.setting.config
        if isinstance(config, GRPOConfig):
            return config.num_samples_per_step * config.data.max_seq_length
        tokens_per_rank = self.workload.row_tokens_per_microbatch * self.workload.num_microbatches
        return tokens_per_rank * self.layout.data_parallel_world_size

    @property
    def tokens_per_second(self) -> float:
        """An upper bound of the tokens per second of all GPUs together."""
        return self.tokens_per_step / self.time.step_s


def make_plan(setting: Setting) -> Plan:
    """The plan of a setting, with what --activation_checkpointing auto comes to in it.

    Raises:
        InputError: the layout cannot be, the model cannot be split so, or its layers are not
            recomputed alike.
    """
    if setting.config.memory.activation_checkpointing == "auto":
        return replace(_choose_checkpointing(setting), is_chosen=True)
    layout = setting.layout
    shape = setting.shape
    check_model(shape, layout, setting.config)
    workload = setting.workload
    _check_layers_alike(shape, workload)
    memory = setting.backend.memory_model(shape, layout, workload)
    phases = memory_by_phase(memory)
    return Plan(
        setting=setting,
        layout=layout,
        workload=workload,
        memory=memory,
        phases=phases,
    )


def check_model(
    shape: ModelShape, layout: ShardLayout | None, config: LearnerConfig | None
) -> None:
    """Check that ranks can share a model's heads and experts, and that the run can train it.

    Args:
        layout: of the ranks; None: they are not checked.
        config: of the run; None: only the ranks are checked.

    Raises:
        InputError: names the flag.
    """
    if layout is not None:
        check_heads(
            layout,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            num_delta_heads=shape.num_delta_heads,
            is_fused=shape.traits.delta == "fused",
            model=shape.name,
        )
        check_experts(layout, num_experts=shape.num_experts, model=shape.name)
        check_feed_forward(layout, sizes={layer.d_ff for layer in shape.layers}, model=shape.name)
    if config is None or not shape.num_experts:
        return
    refuse_first(_find_expert_problems(config, is_balanced=shape.is_balanced))


def _find_expert_problems(config: LearnerConfig, *, is_balanced: bool) -> Iterator[str]:
    """What cannot be done with experts; `is_balanced`: a loss balances them."""
    balances = "the loss that output_router_logits = true in config.json adds"
    is_padded = not getattr(config.data, "packing", True)
    if config.lora.use_qlora:
        yield "--use_qlora: experts lie in stacks, which are not held in 4 bits; leave it out"
    if config.optim.optimizer == "muon":
        yield "--optimizer muon: it takes matrices, and experts lie in stacks; use adamw"
    if config.model.float8_linears != "off":
        yield "--float8_linears: experts multiply in --param_dtype alone; use off"
    if is_balanced and is_padded:
        yield f"--no_packing: {balances} would count padding; leave one of them out"
    if is_balanced and config.parallel.context_parallel_degree > 1:
        yield f"--context_parallel_degree: {balances} is of whole rows; leave one of them out"


def _choose_checkpointing(setting: Setting) -> Plan:
    """The plan with the least arithmetic that leaves room, perhaps with smaller microbatches.

    The batch stays, and a loss does not depend on how it is cut. GRPO's packs are left as they are.
    """
    best = _with_checkpointing(setting)
    if best.workload.checkpointing == "none" or isinstance(setting.config, GRPOConfig):
        return best
    for values in smaller_microbatches(setting.config):
        other = _with_checkpointing(setting.with_flags(values))
        if not other.leaves(AUTO_ROOM):
            continue
        saves_arithmetic = other.time.compute_s * WORTH_A_CUT < best.time.compute_s
        is_better = saves_arithmetic and other.time.step_s < best.time.step_s
        if is_better or not best.leaves(AUTO_ROOM):
            best = other
    return best


def smaller_microbatches(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Flags of smaller microbatches, and more of them for the same batch; of GRPO shorter packs."""
    if isinstance(config, GRPOConfig):
        return _shorten_packs(config.max_tokens_per_microbatch, config.data.max_seq_length)
    return _split_microbatches(config.optim)


def _shorten_packs(num_tokens: int, max_seq_length: int) -> Iterator[dict[str, Any]]:
    while num_tokens > max_seq_length:
        num_tokens = max(num_tokens // 2, max_seq_length)
        yield {"pack_length": num_tokens}


def _split_microbatches(optim: OptimSection) -> Iterator[dict[str, Any]]:
    num_rows = optim.per_device_train_batch_size
    for fewer_rows in reversed(divisors(num_rows)[:-1]):
        num_parts = num_rows // fewer_rows
        yield {
            "per_device_train_batch_size": fewer_rows,
            "gradient_accumulation_steps": optim.gradient_accumulation_steps * num_parts,
        }


def _with_checkpointing(setting: Setting) -> Plan:
    """The plan with the fastest checkpointing that leaves room.

    Equal times are decided by arithmetic, then by memory. Nothing is recomputed on a CPU, or with
    --activation_memory_budget below 1; whole blocks are if nothing less leaves room.
    """
    without = make_plan(setting.with_flags({"activation_checkpointing": "none"}))
    has_budget = setting.config.memory.activation_memory_budget < 1
    if not setting.on_cuda or has_budget or without.leaves(AUTO_ROOM):
        return without
    choices = _recomputations(setting.shape, setting.layout)
    plans = [make_plan(setting.with_flags(flags)) for flags in choices]
    with_room = [plan for plan in plans if plan.leaves(AUTO_ROOM)]
    return min(with_room, key=_speed_order, default=plans[0])


def _speed_order(plan: Plan) -> tuple[float, float, int]:
    return plan.time.step_s, plan.time.compute_s, plan.peak.total_bytes


def _recomputations(shape: ModelShape, layout: ShardLayout) -> Iterator[dict[str, Any]]:
    """Flags to recompute whole blocks, norms, norms and attention, norms and the feed-forward.

    Float32 copies in norms are most of what a block keeps, and cost next to no arithmetic. Norms
    within attention are not recomputed where tensor ranks exchange their inputs.
    """
    yield {"activation_checkpointing": "full"}
    norms = ["attention_norm", "feed_forward_norm"]
    all_norms = norms
    if shape.traits.qk_norm != "none" and layout.tensor_parallel_degree == 1:
        all_norms = [*norms, "attention.q_norm", "attention.k_norm"]
    for modules in (all_norms, [*norms, "attention"], [*all_norms, "feed_forward"]):
        patterns = [f"blocks.*.{module}" for module in modules]
        yield {
            "activation_checkpointing": "selected_modules",
            "activation_checkpointing_modules": patterns,
        }


def _check_layers_alike(shape: ModelShape, workload: Workload) -> None:
    """Refuse modules of some layers only, since one block is planned in the place of all."""
    patterns = workload.checkpointing_modules
    module = _find_uneven_module(patterns, shape.num_layers)
    if module is not None:
        raise InputError(
            f"--activation_checkpointing_modules {spell_value(list(patterns))} treats layers "
            "differently, which cannot be planned; name them all alike, such as "
            f"blocks.*.{module or 'feed_forward'}",
            kind="bad_value",
        )


@lru_cache(maxsize=256)
def _find_uneven_module(patterns: tuple[str, ...], num_layers: int) -> str | None:
    """The first module of a block that the patterns name in some layers and not in others."""
    for module in BLOCK_MODULES:
        wraps = {is_wrapped(patterns, layer, module) for layer in range(num_layers)}
        if len(wraps) > 1:
            return module
    return None
