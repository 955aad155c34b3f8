"""Advice on flags: the smallest change that makes a run fit, or the layout that makes it faster.

Every change is planned again before it is advised, and none is advised that would leave no room.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from open_instruct.config.flags import list_flags, spell_value
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.parallel.node_sizes import MAX_GPUS
from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.plan import Plan, make_plan, smaller_microbatches
from open_instruct.planning.setting import FlagChange, Setting
from open_instruct.planning.subject.workload import MIB

# A faster layout is named only if it is faster by more than the error of a plan.
WORTH_A_CHANGE = 1.02
MAX_TIMES_THE_NODES = 64
REDUCED_LAST = {"gradient_reduction": "last"}
ADAPTERS = {"use_lora": True, "lora_r": 16}
NO_CHANGE = FlagChange(kind=0, strength=0, values={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Flags that differ from those of the run, and the plan with them.

    Example: `Change(values={"activation_checkpointing": "full"}, plan=…)` reads
    "--activation_checkpointing full".
    """

    values: dict[str, Any]
    plan: Plan

    @property
    def flags(self) -> str:
        """The changed flags as the command line of the run has them."""
        words = []
        for name, value in self.values.items():
            if name != "num_nodes":
                words.append(f"--{name} {spell_value(value)}")
        return " ".join(words)

    @property
    def text(self) -> str:
        """The flags, and the nodes if they change; in GRPO the nodes are a flag too."""
        if "num_nodes" not in self.values:
            return self.flags
        nodes = self.plan.setting.gpus_per_node
        if isinstance(self.plan.setting.config, GRPOConfig):
            return f"--num_learners_per_node {spell_value(list(nodes))} {self.flags}".rstrip()
        if not self.flags:
            return f"on {nodes_text(nodes)}"
        return f"on {nodes_text(nodes)} with {self.flags}"


class Advice:
    """All advice about a plan, computed when it is asked for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def to_fit(self) -> Change | None:
        """The smallest change that makes the run fit with room; None if none is needed or helps."""
        return change_to_fit(self.plan)

    @cached_property
    def with_adapters(self) -> Change | None:
        """Training adapters, if the whole model does not fit on these GPUs with another change."""
        setting = self.plan.setting
        can_fit = self.to_fit is not None and "num_nodes" not in self.to_fit.values
        if self.plan.fits or can_fit or setting.config.adapters is not None:
            return None
        adapted = try_flags(setting, ADAPTERS)
        if adapted is None or adapted.plan.has_room:
            return adapted
        more = change_to_fit(adapted.plan, with_more_nodes=False)
        if more is None:
            return None
        return Change(values=ADAPTERS | more.values, plan=more.plan)

    @cached_property
    def ranked(self) -> tuple[Plan, ...]:
        """A plan for each way to share these GPUs, the best first.

        They are in the order of tokens per second, equally fast ones in that of the memory that
        they leave; those that do not fit come last. The other flags stay as they are, so a tensor
        degree makes the global batch of DPO and SFT smaller: what is compared is the tokens that
        all GPUs together learn from in a second. Empty in single_gpu_mode. Left out is what the run
        itself would refuse.
        """
        setting = self.plan.setting
        plans = []
        for values in setting.backend.list_layouts(setting):
            change = try_flags(setting, values)
            if change is not None:
                plans.append(change.plan)
        return tuple(sorted(plans, key=_rank_order))

    @cached_property
    def faster(self) -> Change | None:
        """The fastest layout that fits, if it is faster by `WORTH_A_CHANGE`."""
        best = _find_best(self.ranked)
        least = self.plan.tokens_per_second * WORTH_A_CHANGE
        if not self.plan.fits or best is None or best.tokens_per_second < least:
            return None
        values = {}
        for name, value in vars(best.setting.config.parallel).items():
            if value != getattr(self.plan.setting.config.parallel, name):
                values[name] = value
        return Change(values=values, plan=best)

    @cached_property
    def recomputes_less(self) -> Change | None:
        """The checkpointing that auto would choose, if its arithmetic is less by enough.

        See `WORTH_A_CHANGE`.
        """
        setting = self.plan.setting
        if setting.config.memory.activation_checkpointing == "none":
            return None
        flags = {"activation_checkpointing": "auto"} | _default_checkpointing(setting)
        auto = try_fitting_flags(setting, flags)
        if auto is None:
            return None
        if auto.plan.time.compute_s * WORTH_A_CHANGE >= self.plan.time.compute_s:
            return None
        return auto

    @cached_property
    def exchanges_less(self) -> Change | None:
        """Gradients reduced once in each update, if memory allows it and less is sent."""
        fewer = try_fitting_flags(self.plan.setting, REDUCED_LAST)
        if fewer is None or fewer.plan.sent_bytes >= self.plan.sent_bytes:
            return None
        return fewer


def try_flags(setting: Setting, values: dict[str, Any]) -> Change | None:
    """The run with other flags, planned; None where the run would refuse them."""
    with suppress(InputError):
        return Change(values=values, plan=make_plan(setting.with_flags(values)))
    return None


def try_fitting_flags(setting: Setting, values: dict[str, Any]) -> Change | None:
    """The run with other flags, planned; None where it would refuse them, or does not fit."""
    change = try_flags(setting, values)
    if change is None or not change.plan.has_room:
        return None
    return change


def _find_best(ranked: Sequence[Plan]) -> Plan | None:
    """Of the fastest that fit with room the one that stays in its nodes and exchanges least.

    Where arithmetic bounds them all, it has most to spare.
    """
    with_room = [plan for plan in ranked if plan.has_room]
    if not with_room:
        return None
    best_speed = _round_speed(with_room[0])
    fastest = [plan for plan in with_room if _round_speed(plan) == best_speed]
    return min(fastest, key=_spare_order)


def _spare_order(plan: Plan) -> tuple[bool, float]:
    exchanged_s = (plan.time.in_node_s + plan.time.cross_node_s) / plan.tokens_per_step
    return plan.layout.straddles_nodes, exchanged_s


def _round_speed(plan: Plan) -> float:
    return float(f"{plan.tokens_per_second:.3g}")


def _rank_order(plan: Plan) -> tuple[bool, float, int, bool]:
    if not plan.fits:
        return True, plan.peak.total_bytes, 0, False
    # Among equally fast ones, where arithmetic bounds them all, memory is what they differ in.
    return False, -_round_speed(plan), -plan.headroom_bytes, plan.layout.straddles_nodes


def change_to_fit(plan: Plan, *, with_more_nodes: bool = True) -> Change | None:
    """See `Advice.to_fit`.

    One change comes before two. Among as many, in this order: gradients that are reduced after
    every microbatch, a larger shard degree within the node, full checkpointing, smaller
    microbatches, inputs of blocks on the host, a shard degree across nodes, a tensor degree,
    moments on the host or less for an engine on the same GPU; more GPUs come last of all.
    """
    if plan.has_room:
        return None
    node_choices: Iterable[dict[str, Any]] = [{}]
    if with_more_nodes:
        node_choices = _useful_nodes(plan.setting)
    for nodes in node_choices:
        on_nodes = try_flags(plan.setting, nodes)
        if on_nodes is None:
            continue
        for values in _combinations(on_nodes.plan.setting):
            change = try_fitting_flags(plan.setting, nodes | values)
            if change is not None:
                return change
    return None


def _combinations(setting: Setting) -> Iterator[dict[str, Any]]:
    """Flags to try, the smallest change first."""
    flags_now = vars(setting.config.parallel)
    choices = [_layouts_that_can_fit(setting)]
    for list_changes in OTHER_CHANGES:
        choices.append([NO_CHANGE, *list_changes(setting)])
    for combination in sorted(product(*choices), key=_size_order):
        changes = {}
        for name, value in _merge_values(combination).items():
            if flags_now.get(name) != value:
                changes[name] = value
        yield changes


def _size_order(combination: Sequence[FlagChange]) -> tuple[int, list[int], int]:
    """The number of changes, then their kinds, then their strengths: the smallest comes first."""
    changes = [change for change in combination if change is not NO_CHANGE]
    kinds = sorted(change.kind for change in changes)
    return len(changes), kinds, sum(change.strength for change in changes)


def _merge_values(changes: Sequence[FlagChange]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for change in changes:
        values |= change.values
    return values


def _layouts_that_can_fit(setting: Setting) -> list[FlagChange]:
    """This layout and others, without those that never fit, whatever else is changed."""
    strongest = []
    for list_changes in OTHER_CHANGES:
        strongest += list_changes(setting)[-1:]
    layouts = []
    for layout in (NO_CHANGE, *setting.backend.list_memory_changes(setting)):
        if try_fitting_flags(setting, _merge_values([*strongest, layout])) is not None:
            layouts.append(layout)
    return layouts


def _checkpointing(setting: Setting) -> list[FlagChange]:
    """Recompute whole blocks (kind 1), then also keep their inputs on the host (kind 3)."""
    kinds = {"full": 1}
    if setting.on_cuda:
        kinds["offload"] = 3
    now = kinds.get(setting.config.memory.activation_checkpointing, 0)
    changes = []
    for mode, kind in kinds.items():
        if kind > now:
            values = {"activation_checkpointing": mode} | _default_checkpointing(setting)
            changes.append(FlagChange(kind=kind, strength=1, values=values))
    return changes


def _default_checkpointing(setting: Setting) -> dict[str, Any]:
    """Flags that another --activation_checkpointing would refuse, at their defaults."""
    flags = list_flags(type(setting.config))
    values = {}
    for name in ("activation_checkpointing_modules", "activation_memory_budget"):
        default = flags[name].default
        if getattr(setting.config.memory, name) != default:
            values[name] = default
    return values


def _microbatches(setting: Setting) -> list[FlagChange]:
    """Smaller microbatches and more of them (kind 2); shorter packs for GRPO."""
    return _strengthen(2, smaller_microbatches(setting.config))


def _engine_shares(setting: Setting) -> list[FlagChange]:
    """Less of the GPU for an engine that shares it (kind 6), down to a cache of one sequence."""
    config = setting.config
    if not isinstance(config, GRPOConfig) or not config.parallel.single_gpu_mode:
        return []
    shape = setting.shape
    sync_bytes = setting.workload.sync_bytes_per_param
    token_bytes = 2 * len(shape.windows) * shape.kv_width * sync_bytes
    cache_bytes = config.data.max_seq_length * token_bytes
    now_mib = config.fleet.vllm_kv_cache_mib
    if now_mib is not None:
        halves = [now_mib >> times for times in range(1, now_mib.bit_length())]
        caches = [mib for mib in halves if mib * MIB >= cache_bytes]
        return _strengthen(6, ({"vllm_kv_cache_mib": mib} for mib in caches))
    least = (shape.num_params * sync_bytes + cache_bytes) / setting.device.memory_bytes
    now = config.fleet.vllm_gpu_memory_utilization
    twentieths = [count / 20 for count in range(19, 0, -1)]
    shares = [share for share in twentieths if least <= share < now]
    return _strengthen(6, ({"vllm_gpu_memory_utilization": share} for share in shares))


def _reductions(setting: Setting) -> list[FlagChange]:
    """Gradients that are reduced after every microbatch: the mildest change of all."""
    if setting.config.parallel.gradient_reduction != "last":
        return []
    return [FlagChange(kind=0, strength=0, values={"gradient_reduction": "every"})]


def _strengthen(kind: int, choices: Iterable[dict[str, Any]]) -> list[FlagChange]:
    """A change for each choice of values, from the mildest to the strongest."""
    return [
        FlagChange(kind=kind, strength=strength, values=values)
        for strength, values in enumerate(choices, start=1)
    ]


# All that may be changed beside the layout; each lists its changes from the mildest on.
OTHER_CHANGES = (_reductions, _checkpointing, _microbatches, _engine_shares)


def _useful_nodes(setting: Setting) -> Iterator[dict[str, Any]]:
    """No change of the nodes, then twice as many, and so on, if more would help."""
    yield {}
    parallel = setting.config.parallel
    if len(set(setting.gpus_per_node)) != 1 or parallel.single_gpu_mode:
        return
    degrees: dict[str, Any] = {}
    # If both degrees are given, they fix the number of GPUs.
    if parallel.fsdp_shard_degree is not None and parallel.fsdp_num_replicas is not None:
        degrees["fsdp_num_replicas"] = None
    most_times = min(MAX_TIMES_THE_NODES, MAX_GPUS // sum(setting.gpus_per_node))
    num_nodes = len(setting.gpus_per_node)
    more = []
    for doublings in range(1, most_times.bit_length()):
        more.append({"num_nodes": num_nodes * 2**doublings} | degrees)
    if not more:
        return
    most = try_flags(setting, more[-1])
    if most is not None and _layouts_that_can_fit(most.plan.setting):
        yield from more
