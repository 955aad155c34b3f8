"""Advice on flags: the smallest change that makes a run fit, or the layout that makes it faster.

Every change is planned again before it is advised, and none is advised that would leave no room.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from open_instruct.config.flags import flags_of, spelled
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
        return " ".join(
            f"--{name} {spelled(value)}"
            for name, value in self.values.items()
            if name != "num_nodes"
        )

    @property
    def text(self) -> str:
        """The flags, and the nodes if they change; in GRPO the nodes are a flag too."""
        if "num_nodes" not in self.values:
            return self.flags
        nodes = self.plan.setting.gpus_per_node
        if isinstance(self.plan.setting.config, GRPOConfig):
            return f"--num_learners_per_node {spelled(list(nodes))} {self.flags}".rstrip()
        return f"on {nodes_text(nodes)}" + (f" with {self.flags}" if self.flags else "")


class Advice:
    """All advice about a plan, computed when it is asked for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def to_fit(self) -> Change | None:
        """The smallest change that makes the run fit with room;

        None if it already does or no change helps.
        """
        return change_to_fit(self.plan)

    @cached_property
    def with_adapters(self) -> Change | None:
        """Training adapters, if the whole model does not fit on these GPUs with any other
        change.
        """
        setting = self.plan.setting
        fits_on_these = self.plan.fits or (
            self.to_fit is not None and "num_nodes" not in self.to_fit.values
        )
        adapted = None if fits_on_these or setting.config.adapters else changed(setting, ADAPTERS)
        if adapted is None or adapted.plan.has_room:
            return adapted
        more = change_to_fit(adapted.plan, with_more_nodes=False)
        return more and Change(values=ADAPTERS | more.values, plan=more.plan)

    @cached_property
    def ranked(self) -> tuple[Plan, ...]:
        """A plan for each way to share these GPUs: by tokens per second, equally fast ones by the
        memory that they leave, then those that do not fit.

        The other flags stay as they are, so a tensor degree makes the global batch of DPO and SFT
        smaller: what is compared is the tokens that all GPUs together learn from in a second. Empty
        in single_gpu_mode. Left out is what the run itself would refuse.
        """
        setting = self.plan.setting
        changes = (changed(setting, values) for values in setting.backend.others(setting))
        return tuple(sorted((change.plan for change in changes if change), key=_order))

    @cached_property
    def faster(self) -> Change | None:
        """The fastest layout that fits, if it is faster by `WORTH_A_CHANGE`."""
        best = _find_best(self.ranked)
        least = self.plan.tokens_per_second * WORTH_A_CHANGE
        if not self.plan.fits or best is None or best.tokens_per_second < least:
            return None
        now = vars(self.plan.setting.config.parallel)
        then = vars(best.setting.config.parallel)
        return Change(
            values={name: value for name, value in then.items() if value != now[name]}, plan=best
        )

    @cached_property
    def recomputes_less(self) -> Change | None:
        """The checkpointing that auto would choose, if its arithmetic is less by more than
        `WORTH_A_CHANGE`.
        """
        setting = self.plan.setting
        if setting.config.memory.activation_checkpointing == "none":
            return None
        auto = fitting(
            setting, {"activation_checkpointing": "auto"} | _default_checkpointing(setting)
        )
        return (
            auto
            if auto and auto.plan.time.compute_s * WORTH_A_CHANGE < self.plan.time.compute_s
            else None
        )

    @cached_property
    def exchanges_less(self) -> Change | None:
        """Gradients reduced once in each update, if memory allows it and less is sent."""
        fewer = fitting(self.plan.setting, REDUCED_LAST)
        return fewer if fewer and fewer.plan.sent_bytes < self.plan.sent_bytes else None


def changed(setting: Setting, values: dict[str, Any]) -> Change | None:
    """The run with other flags, planned; None where the run would refuse them."""
    with suppress(InputError):
        return Change(values=values, plan=make_plan(setting.with_flags(values)))
    return None


def fitting(setting: Setting, values: dict[str, Any]) -> Change | None:
    """The plan with these flags; None if the run would refuse them, or if it does not fit."""
    change = changed(setting, values)
    return change if change and change.plan.has_room else None


def _find_best(ranked: Sequence[Plan]) -> Plan | None:
    """Of the fastest that fit with room the one that stays in its nodes and exchanges least.

    Where arithmetic bounds them all, it has most to spare.
    """
    with_room = [plan for plan in ranked if plan.has_room]
    if not with_room:
        return None
    fastest = [plan for plan in with_room if _round_speed(plan) == _round_speed(with_room[0])]
    return min(fastest, key=_spare_order)


def _spare_order(plan: Plan) -> tuple[bool, float]:
    exchanged_s = (plan.time.in_node_s + plan.time.cross_node_s) / plan.tokens_per_step
    return plan.layout.straddles_nodes, exchanged_s


def _round_speed(plan: Plan) -> float:
    return float(f"{plan.tokens_per_second:.3g}")


def _order(plan: Plan) -> tuple[bool, float, int, bool]:
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
    for nodes in _useful_nodes(plan.setting) if with_more_nodes else ({},):
        on_nodes = changed(plan.setting, nodes)
        for values in _combinations(on_nodes.plan.setting) if on_nodes else ():
            if change := fitting(plan.setting, nodes | values):
                return change
    return None


def _combinations(setting: Setting) -> Iterator[dict[str, Any]]:
    """Flags to try, the smallest change first."""
    now = vars(setting.config.parallel)
    choices = [_layouts_that_can_fit(setting)]
    choices += [[NO_CHANGE, *ways(setting)] for ways in WAYS_TO_NEED_LESS]
    for chosen in sorted(product(*choices), key=_size_of_change):
        yield {name: value for name, value in _flags_of(chosen).items() if now.get(name) != value}


def _size_of_change(chosen: Sequence[FlagChange]) -> tuple[int, list[int], int]:
    """The sort key of a change, smallest first: the number of flags, then their kinds, then their
    strengths.
    """
    changes = [way for way in chosen if way is not NO_CHANGE]
    return len(changes), sorted(way.kind for way in changes), sum(way.strength for way in changes)


def _flags_of(ways: Sequence[FlagChange]) -> dict[str, Any]:
    return {name: value for way in ways for name, value in way.values.items()}


def _layouts_that_can_fit(setting: Setting) -> list[FlagChange]:
    """The given layout and others, without those that do not fit even with everything else at its
    smallest.
    """
    strongest = [way for ways in WAYS_TO_NEED_LESS for way in ways(setting)[-1:]]
    layouts = (NO_CHANGE, *setting.backend.ways_to_need_less(setting))
    return [layout for layout in layouts if fitting(setting, _flags_of([*strongest, layout]))]


def _checkpointing(setting: Setting) -> list[FlagChange]:
    """Recompute whole blocks (kind 1), then also keep their inputs on the host (kind 3)."""
    kinds = {"full": 1, "offload": 3} if setting.on_cuda else {"full": 1}
    now = kinds.get(setting.config.memory.activation_checkpointing, 0)
    return [
        FlagChange(
            kind=kind,
            strength=1,
            values={"activation_checkpointing": mode} | _default_checkpointing(setting),
        )
        for mode, kind in kinds.items()
        if kind > now
    ]


def _default_checkpointing(setting: Setting) -> dict[str, Any]:
    """Flags that another --activation_checkpointing would refuse, at their defaults."""
    flags = flags_of(type(setting.config))
    defaults = {
        name: flags[name].default
        for name in ("activation_checkpointing_modules", "activation_memory_budget")
    }
    return {
        name: value
        for name, value in defaults.items()
        if getattr(setting.config.memory, name) != value
    }


def _microbatches(setting: Setting) -> list[FlagChange]:
    """Smaller microbatches and more of them (kind 2); shorter packs for GRPO."""
    return _ever_stronger(2, [*smaller_microbatches(setting.config)])


def _engine_shares(setting: Setting) -> list[FlagChange]:
    """Less of the GPU for an engine that shares it (kind 6), as long as the cache holds a sequence
    of full length.
    """
    config, shape = setting.config, setting.shape
    if not isinstance(config, GRPOConfig) or not config.parallel.single_gpu_mode:
        return []
    sync_bytes = setting.workload.sync_bytes_per_param
    cache_bytes = 2 * len(shape.windows) * shape.kv_width * config.data.max_seq_length * sync_bytes
    if (now_mib := config.fleet.vllm_kv_cache_mib) is not None:
        halves = [now_mib >> times for times in range(1, now_mib.bit_length())]
        return _ever_stronger(
            6, [{"vllm_kv_cache_mib": mib} for mib in halves if mib * MIB >= cache_bytes]
        )
    least = (shape.num_params * sync_bytes + cache_bytes) / setting.device.memory_bytes
    now = config.fleet.vllm_gpu_memory_utilization
    shares = [twentieths / 20 for twentieths in range(19, 0, -1)]
    return _ever_stronger(
        6, [{"vllm_gpu_memory_utilization": share} for share in shares if least <= share < now]
    )


def _reductions(setting: Setting) -> list[FlagChange]:
    """Gradients that are reduced after every microbatch: the mildest change of all."""
    is_last = setting.config.parallel.gradient_reduction == "last"
    return (
        [FlagChange(kind=0, strength=0, values={"gradient_reduction": "every"})] if is_last else []
    )


def _ever_stronger(kind: int, all_values: Sequence[dict[str, Any]]) -> list[FlagChange]:
    """A `FlagChange` for each of the values, in their order."""
    return [
        FlagChange(kind=kind, strength=index, values=values)
        for index, values in enumerate(all_values, start=1)
    ]


WAYS_TO_NEED_LESS = (_reductions, _checkpointing, _microbatches, _engine_shares)


def _useful_nodes(setting: Setting) -> Iterator[dict[str, Any]]:
    """The given nodes, then twice as many, and so on; only the given ones where more would not
    help.
    """
    yield {}
    parallel = setting.config.parallel
    if len(set(setting.gpus_per_node)) != 1 or parallel.single_gpu_mode:
        return
    # If both degrees are given, they fix the number of GPUs.
    both = parallel.fsdp_shard_degree is not None and parallel.fsdp_num_replicas is not None
    freed = {"fsdp_num_replicas": None} if both else {}
    most_times = min(MAX_TIMES_THE_NODES, MAX_GPUS // sum(setting.gpus_per_node))
    num_nodes = len(setting.gpus_per_node)
    more = [
        {"num_nodes": num_nodes * 2**doublings} | freed
        for doublings in range(1, most_times.bit_length())
    ]
    most = changed(setting, more[-1]) if more else None
    if most is not None and _layouts_that_can_fit(most.plan.setting):
        yield from more
