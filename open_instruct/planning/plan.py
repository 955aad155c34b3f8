"""A whole plan: the layout, memory, traffic and time of a run on given machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

from open_instruct.config.flags import flags_of, spelled
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError, refuse_first
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import check_experts, check_heads, divisors, find_layout
from open_instruct.planning.memory.block import BLOCK_MODULES
from open_instruct.planning.memory.phases import Moments, Phase, memory_by_phase, phase_of
from open_instruct.planning.memory.state import sync_buckets
from open_instruct.planning.step_time import ON_THE_PATH, StepTime, SyncCost, step_time, sync_costs
from open_instruct.planning.subject.devices import Device
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.workload import (
    RunConfig,
    Workload,
    adapted,
    is_wrapped,
    objective_of,
    workload_of,
)
from open_instruct.planning.traffic import (
    Exchange,
    traffic_of_merging,
    traffic_of_weight_sync,
    traffic_per_step,
)

# The share of a GPU that advice leaves free, and the share that --activation_checkpointing auto
# leaves free.
ROOM = 0.05
ROOM_OF_AUTO = 0.1
# Smaller microbatches run smaller products: they must save more arithmetic than a plan is off.
WORTH_A_CUT = 1.02
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
DEGREES = ("fsdp_shard_degree", "fsdp_num_replicas", "tensor_parallel_degree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One change of flags.

    Kinds are tried in their order, and ways of one kind from the mildest on.
    """

    kind: int
    strength: int
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run and its machines: the input of a plan.

    Example: DPO of a 7B model on two nodes of 8 H100::

        Setting(config=DPOConfig(…), shape=model_shape("allenai/OLMo-2-1124-7B"), gpus_per_node=(8,
                8),
                device=device_named("h100"))
    """

    config: RunConfig
    shape: ModelShape
    gpus_per_node: tuple[int, ...]  # for training; GPUs of engines come on top
    device: Device
    mfu: float = 0.4
    on_cuda: bool = True
    shared_prompt_tokens: int = 0
    has_engines_in_node: bool = False  # one node has learners and engines

    @cached_property
    def layout(self) -> ShardLayout:
        """The layout that the run itself would take.

        Raises:
            InputError: the sharding flags cannot work on these nodes.
        """
        return find_layout(self.config.parallel, self.gpus_per_node, self.config.backend)

    @cached_property
    def backend(self) -> Backend:
        """The backend (--backend) that shards the model, as the planner asks it."""
        backend: Backend = self.config.backend.planned(self.config)
        return backend

    @cached_property
    def workload(self) -> Workload:
        """The work of one rank in a step."""
        workload = workload_of(
            self.config, self.shape, self.layout, prompt_tokens=self.shared_prompt_tokens
        )
        workload = replace(workload, on_cuda=self.on_cuda)
        copies = {"on": True, "off": False}.get(self.config.run.async_checkpoints, self.on_cuda)
        crosses = not (
            self.has_engines_in_node or workload.shares_device or workload.sync_backend == "shm"
        )
        if isinstance(self.config, GRPOConfig):
            workload = replace(workload, sync_choice=self.config.choose_sync(same_host=not crosses))
        if isinstance(self.config, GRPOConfig) and workload.shares_device:
            cache_bytes = workload.cache_bytes(
                self.config.fleet, self.shape, self.device.memory_bytes
            )
            workload = replace(workload, kv_cache_bytes=cache_bytes)
        on_host = self.config.parallel if self.on_cuda else ParallelSection()
        workload = replace(
            workload, has_moments_on_host=on_host.adam_offload, has_weights_on_host=on_host.offload
        )
        return replace(workload, copies_checkpoints=copies, sync_crosses_nodes=crosses)

    def with_flags(self, values: dict[str, Any]) -> Setting:
        """The same run with other values of some flags; `num_nodes` gives more nodes like the
        first.

        Raises:
            InputError: the flags do not go together.
        """
        values = dict(values)
        nodes = self.gpus_per_node
        if "num_nodes" in values:
            nodes = (nodes[0],) * values.pop("num_nodes")
        config: Any = self.config
        if isinstance(config, GRPOConfig):
            values["num_learners_per_node"] = list(nodes)
        flags = flags_of(type(config))
        for name, value in values.items():
            section = flags[name].section
            config = replace(
                config, **{section: replace(getattr(config, section), **{name: value})}
            )
        objective_of(config).validate(config)
        in_node = self.has_engines_in_node and len(nodes) == 1
        shape = adapted(self.shape, config.adapters)
        return replace(
            self, config=config, shape=shape, gpus_per_node=nodes, has_engines_in_node=in_node
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory, traffic and time of a run in one setting. The memory is that of the rank that needs
    most.

    `is_chosen`: --activation_checkpointing was auto, and the planner has chosen.
    """

    setting: Setting
    layout: ShardLayout
    workload: Workload
    moments: Moments
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
        """Whether it fits with a margin for fragmentation and other libraries, which plans do not
        count.
        """
        return self.leaves(ROOM)

    def leaves(self, share: float) -> bool:
        """Whether this share of a GPU stays free."""
        return self.headroom_bytes >= share * self.setting.device.memory_bytes

    @property
    def models(self) -> list[Moments]:
        """The policy, and the critic where there is one."""
        return [self.moments, *filter(None, [self.moments.critic])]

    @cached_property
    def host(self) -> Phase:
        """The host memory of each GPU's process."""
        of_models = (Counter(each.on_host()) for each in self.models)
        return phase_of("host", [sum(of_models, Counter[str]())])

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states, which are the least that a run
        needs.
        """
        return sum(sum(each.state_bytes()) for each in self.models)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All communication of one rank in a step."""
        exchanges = [
            each for model in self.models for each in self.setting.backend.exchanges(model)
        ]
        if self.workload.num_engines:
            buckets = sync_buckets(self.setting.shape, self.layout, self.workload)
            exchanges += traffic_of_weight_sync(buckets, self.workload)
        return tuple(exchanges)

    @cached_property
    def syncs(self) -> tuple[SyncCost, ...]:
        """What a weight sync costs, if there are engines: all weights first, then shares of them
        that have changed.

        Through a folder it takes as long as that does, which is not known.
        """
        costs = sync_costs(
            self.setting.shape, self.layout, self.workload, self.setting.device, self.exchanges
        )
        return (
            tuple(costs)
            if self.workload.num_engines and self.workload.sync_backend != "files"
            else ()
        )

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
    def waited_for(self) -> list[str]:
        """The groups whose exchanges arithmetic waits for."""
        axes = {exchange.axis for exchange in self.exchanges if exchange.wire_bytes}
        return [name for axis, name in ON_THE_PATH.items() if axis in axes]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks learn from in a step, where rows have their full length."""
        config = self.setting.config
        if isinstance(config, GRPOConfig):
            return config.num_samples_per_step * config.data.max_seq_length
        workload = self.workload
        return (
            workload.row_tokens_per_microbatch
            * workload.num_microbatches
            * self.layout.data_parallel_world_size
        )

    @property
    def tokens_per_second(self) -> float:
        """An upper bound of the tokens per second of all GPUs together."""
        return self.tokens_per_step / self.time.step_s


class Backend:
    """The backend's part of a plan; this class is FSDP2's, and other backends override its
    methods.
    """

    sharing = ""  # how, where that is no layout that can be drawn

    def moments(self, shape: ModelShape, layout: ShardLayout, workload: Workload) -> Moments:
        return Moments(shape, layout, workload)

    def exchanges(self, run: Moments) -> Iterable[Exchange]:
        """The collectives of one step, and of adding adapters to the weights that are sent."""
        merging = traffic_of_merging(run.shape, run.layout) if run.workload.merges_adapters else ()
        return (*traffic_per_step(run.shape, run.layout, run.workload), *merging)

    def cells(self, layout: ShardLayout) -> dict[str, object]:
        """The three columns that distinguish a layout in the ranking."""
        degrees = (
            f"{layout.shard_degree} ×",
            f"{layout.num_replicas} ×",
            layout.tensor_parallel_degree,
        )
        return dict(zip(("shard ×", "replicas ×", "tensor"), degrees, strict=True))

    def others(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Flags of every way to share on these devices: each (shard degree, replicas, tensor
        degree) of several.

        Among them are those that the run would refuse, such as tensor degrees that split heads.
        """
        parallel = setting.config.parallel
        if parallel.single_gpu_mode:
            return
        num_ranks = sum(setting.gpus_per_node) // parallel.context_parallel_degree
        for tensor in divisors(num_ranks):
            for shard in divisors(num_ranks // tensor):
                values = dict(
                    zip(DEGREES, (shard, num_ranks // tensor // shard, tensor), strict=True)
                )
                if parallel.expert_parallel_degree == 1:
                    yield values
                elif setting.shape.num_experts % shard == 0:
                    yield values | {"expert_parallel_degree": shard}

    def ways_to_need_less(self, setting: Setting) -> Iterator[Way]:
        """Larger shard degrees in a node (kind 0) and across (4), tensor degrees (5), on hosts
        moments (6), all (7).
        """
        now, flags = setting.layout, setting.config
        if setting.on_cuda and not flags.parallel.offload:
            if flags.optim.optimizer in ("adamw", "adamw_8bit") and not flags.parallel.adam_offload:
                yield Way(kind=6, strength=0, values={"adam_offload": True})
            if flags.optim.optimizer != "muon" and not flags.parallel.single_gpu_mode:
                yield Way(kind=7, strength=0, values={"offload": True})
        context = now.context_parallel_degree
        for values in self.others(setting):
            shard, _, tensor, *_ = values.values()
            if tensor == now.tensor_parallel_degree and shard > now.shard_degree:
                straddles = setting.with_flags(values).layout.straddles_nodes
                yield Way(kind=4 if straddles else 0, strength=shard, values=values)
            is_larger = shard * tensor >= now.shard_degree * now.tensor_parallel_degree
            in_a_node = gcd(*now.gpus_per_node) % (tensor * context) == 0
            if tensor > now.tensor_parallel_degree and is_larger and in_a_node:
                yield Way(kind=5, strength=shard * tensor, values=values)


def plan_of(setting: Setting) -> Plan:
    """The plan of a setting, with what --activation_checkpointing auto comes to in it.

    Raises:
        InputError: the layout cannot be, the model cannot be split so, or its layers are not
            recomputed alike.
    """
    if setting.config.memory.activation_checkpointing == "auto":
        return replace(_chosen(setting), is_chosen=True)
    layout = setting.layout
    shape = setting.shape
    check_model(shape, layout, setting.config)
    workload = setting.workload
    _check_layers_alike(shape, workload)
    moments = setting.backend.moments(shape, layout, workload)
    phases = memory_by_phase(moments)
    return Plan(setting=setting, layout=layout, workload=workload, moments=moments, phases=phases)


def check_model(
    shape: ModelShape, layout: ShardLayout | None, config: LearnerConfig | None
) -> None:
    """Check that the ranks of `layout` can share the heads and the experts of a model, and that
    `config` can train it.

    :raises InputError: names the flag.
    """
    if layout is not None:
        heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
        heads["num_delta_heads"] = shape.num_delta_heads
        check_heads(layout, **heads, model=shape.name, is_fused=shape.traits.delta == "fused")
        check_experts(layout, num_experts=shape.num_experts, model=shape.name)
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


def _chosen(setting: Setting) -> Plan:
    """The plan with the least arithmetic of those that leave room in microbatches as they are or
    smaller.

    The batch stays, and a loss does not depend on how it is cut. GRPO's packs are left as they are.
    """
    best = _with_checkpointing(setting)
    if best.workload.checkpointing == "none" or isinstance(setting.config, GRPOConfig):
        return best
    for values in smaller_microbatches(setting.config):
        other = _with_checkpointing(setting.with_flags(values))
        is_less = (
            other.time.compute_s * WORTH_A_CUT < best.time.compute_s
            and other.time.step_s < best.time.step_s
        )
        best = (
            other
            if other.leaves(ROOM_OF_AUTO) and (is_less or not best.leaves(ROOM_OF_AUTO))
            else best
        )
    return best


def smaller_microbatches(config: RunConfig) -> Iterator[dict[str, Any]]:
    """The flags of smaller microbatches and more of them, so that the global batch stays; of GRPO
    shorter packs.
    """
    if isinstance(config, GRPOConfig):
        tokens = config.max_tokens_per_microbatch
        while tokens > config.data.max_seq_length:
            tokens = max(tokens // 2, config.data.max_seq_length)
            yield {"pack_length": tokens}
        return
    rows, num_microbatches = (
        config.optim.per_device_train_batch_size,
        config.optim.gradient_accumulation_steps,
    )
    for fewer in reversed(divisors(rows)[:-1]):
        yield dict(zip(BATCH, (fewer, num_microbatches * (rows // fewer)), strict=True))


def _with_checkpointing(setting: Setting) -> Plan:
    """The plan with the fastest checkpointing that leaves room; equal times are decided by
    arithmetic, then by memory.

    Nothing is recomputed on a CPU, or with --activation_memory_budget below 1; whole blocks are if
    nothing less leaves room.
    """
    kept = plan_of(setting.with_flags({"activation_checkpointing": "none"}))
    if (
        not setting.on_cuda
        or setting.config.memory.activation_memory_budget < 1
        or kept.leaves(ROOM_OF_AUTO)
    ):
        return kept
    ways = _recomputations(setting.shape, setting.layout)
    full, *selected = (plan_of(setting.with_flags(flags)) for flags in ways)
    with_room = [plan for plan in (full, *selected) if plan.leaves(ROOM_OF_AUTO)]
    return min(
        with_room,
        key=lambda plan: (plan.time.step_s, plan.time.compute_s, plan.peak.total_bytes),
        default=full,
    )


def _recomputations(shape: ModelShape, layout: ShardLayout) -> Iterator[dict[str, Any]]:
    """The flags to recompute whole blocks, norms alone, norms with attention, norms with the
    feed-forward.

    Float32 copies in norms are most of what a block keeps, and cost next to no arithmetic. Norms
    within attention are not recomputed where tensor ranks exchange their inputs.
    """
    yield {"activation_checkpointing": "full"}
    norms = ["attention_norm", "feed_forward_norm"]
    has_inner = shape.traits.qk_norm != "none" and layout.tensor_parallel_degree == 1
    inner = ["attention.q_norm", "attention.k_norm"] if has_inner else []
    for modules in ([*norms, *inner], [*norms, "attention"], [*norms, *inner, "feed_forward"]):
        patterns = [f"blocks.*.{module}" for module in modules]
        yield {
            "activation_checkpointing": "selected_modules",
            "activation_checkpointing_modules": patterns,
        }


def _check_layers_alike(shape: ModelShape, workload: Workload) -> None:
    """The memory of one block is taken for that of all; a run itself may checkpoint some layers
    only.
    """
    patterns = workload.checkpointing_modules
    module = _find_uneven_module(patterns, shape.num_layers)
    if module is not None:
        raise InputError(
            f"--activation_checkpointing_modules {spelled(list(patterns))} treats layers "
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
