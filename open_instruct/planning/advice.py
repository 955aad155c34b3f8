"""What to change: the smallest change that makes a run fit, or the layout that makes it faster.

Every change is planned again before it is advised, and none is advised that would leave no room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from open_instruct.config.flags import flags_of, spelled
from open_instruct.config.grpo import GRPOConfig
from open_instruct.errors import InputError
from open_instruct.parallel.layout import divisors
from open_instruct.parallel.node_sizes import MAX_GPUS
from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.plan import Plan, Setting, Way, plan_of, ranked_layouts
from open_instruct.planning.subject.units import amount, gib, seconds
from open_instruct.planning.subject.workload import MIB

# A faster layout is named only if it is faster by more than the error of a plan.
WORTH_A_CHANGE = 1.02
MAX_TIMES_THE_NODES = 64
REDUCED_LAST = {"gradient_reduction": "last"}
ADAPTERS = {"use_lora": True, "lora_r": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Flags that differ from those of the run, and the plan with them.

    Example: `Change(values={"activation_checkpointing": "full"}, plan=…)` reads "--activation_checkpointing full".
    """

    values: dict[str, Any]
    plan: Plan

    @property
    def flags(self) -> str:
        """As they are written on the command line of the run."""
        return " ".join(f"--{name} {spelled(value)}" for name, value in self.values.items() if name != "num_nodes")

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

    def lines(self) -> Iterator[str]:
        """The advice in sentences."""
        fits = self.plan.fits
        if self.to_fit is not None:
            little_room = "It fits, but leaves little room. The smallest change that leaves more"
            yield from self._said(little_room if fits else "The smallest change that fits", self.to_fit)
        elif fits and self.faster is not None:
            times = self.faster.plan.tokens_per_second / self.plan.tokens_per_second
            yield from self._said("Faster and fits", self.faster, f": {times:.2f} times the tokens per second")
        elif fits:
            yield "It fits, and no other layout of these GPUs is faster." if len(self.ranked) > 1 else "It fits."
        elif self.with_adapters is None:
            yield "No flag makes it fit: take a smaller model, shorter sequences, or GPUs with more memory."
        if self.with_adapters is not None:
            yield from self._said("Adapters alone, beside the frozen model, fit on these GPUs", self.with_adapters)
        if self.recomputes_less is not None:
            fewer = 1 - self.recomputes_less.plan.time.compute_s / self.plan.time.compute_s
            yield from self._said(
                "Recomputes less and fits", self.recomputes_less, f", with {fewer:.0%} less arithmetic"
            )
        if self.exchanges_less is not None:
            saved = amount(self.plan.sent_bytes - self.exchanges_less.plan.sent_bytes)
            yield from self._said("Exchanges less and fits", self.exchanges_less, f", in which it sends {saved} less")

    def _said(self, what: str, change: Change, more: str = "") -> Iterator[str]:
        """A sentence on a change, the memory that the run needs with it, and its global batch if that changes."""
        plan, before = change.plan, self.plan.tokens_per_step
        peak, memory = gib(plan.peak.total_bytes), gib(plan.setting.device.memory_bytes)
        yield f"{what}: {change.text}"
        yield f"It needs {peak} of {memory} GiB on each GPU, and at least {seconds(plan.time.step_s)} a step{more}."
        if plan.tokens_per_step != before:
            yield f"The global batch becomes {plan.tokens_per_step:,} tokens, from {before:,}."

    @cached_property
    def to_fit(self) -> Change | None:
        """The smallest change that makes the run fit with room; None if it already does or no change helps."""
        return change_to_fit(self.plan)

    @cached_property
    def with_adapters(self) -> Change | None:
        """Training adapters, if the whole model does not fit on these GPUs with any other change."""
        setting, helps = self.plan.setting, self.to_fit is not None and "num_nodes" not in self.to_fit.values
        if self.plan.fits or helps or setting.config.adapters or not (adapted := _planned(setting, ADAPTERS)):
            return None
        if adapted.has_room:
            return Change(values=ADAPTERS, plan=adapted)
        change = change_to_fit(adapted, with_more_nodes=False)
        return change and Change(values=ADAPTERS | change.values, plan=change.plan)

    @cached_property
    def ranked(self) -> tuple[Plan, ...]:
        """Every layout of these GPUs, the fastest that fits first."""
        return ranked_layouts(self.plan.setting)

    @cached_property
    def faster(self) -> Change | None:
        """The fastest layout that fits, if it is faster by `WORTH_A_CHANGE`."""
        best = next((other for other in self.ranked if other.has_room), None)
        least = self.plan.tokens_per_second * WORTH_A_CHANGE
        if not self.plan.fits or best is None or best.tokens_per_second < least:
            return None
        now, then = (vars(each.setting.config.parallel) for each in (self.plan, best))
        return Change(values={name: value for name, value in then.items() if value != now[name]}, plan=best)

    @cached_property
    def recomputes_less(self) -> Change | None:
        """The checkpointing that auto would choose, if its arithmetic is less by more than `WORTH_A_CHANGE`."""
        memory = self.plan.setting.config.memory
        values = {"activation_checkpointing": "auto"} | _freed(self.plan.setting)
        auto = None if memory.activation_checkpointing == "none" else _planned(self.plan.setting, values)
        saves = auto is not None and auto.time.compute_s * WORTH_A_CHANGE < self.plan.time.compute_s
        return Change(values=values, plan=auto) if auto and saves and auto.has_room else None

    @cached_property
    def exchanges_less(self) -> Change | None:
        """Gradients reduced once in each update, if memory allows it and less is sent."""
        fewer = _planned(self.plan.setting, REDUCED_LAST)
        is_better = fewer is not None and fewer.has_room and fewer.sent_bytes < self.plan.sent_bytes
        return Change(values=REDUCED_LAST, plan=fewer) if fewer and is_better else None


def change_to_fit(plan: Plan, *, with_more_nodes: bool = True) -> Change | None:
    """See `Advice.to_fit`.

    One change comes before two. Among as many, in this order: gradients that are reduced after every microbatch, a
    larger shard degree within the node, full checkpointing, smaller microbatches, inputs of blocks on the host, a shard
    degree across nodes, a tensor degree, less for an engine on the same GPU; more GPUs come last of all.
    """
    if plan.has_room:
        return None
    for nodes in _useful_nodes(plan.setting) if with_more_nodes else ({},):
        base = _planned(plan.setting, nodes)
        for values in _combinations(base.setting) if base else ():
            if base and (changed := _planned(base.setting, values)) and changed.has_room:
                return Change(values=nodes | values, plan=changed)
    return None


def _combinations(setting: Setting) -> Iterator[dict[str, Any]]:
    """Flags to try, the smallest change first."""
    now = vars(setting.config.parallel)
    slots = (_layouts_that_can_fit(setting), *([None, *options(setting)] for options in WAYS_TO_NEED_LESS))
    chosen = [[option for option in choice if option is not None] for choice in product(*slots)]
    for choice in sorted(chosen, key=_size_of_change):
        every = (flag for option in choice for flag in option.values.items())
        yield {name: value for name, value in every if name not in now or now[name] != value}


def _size_of_change(choice: Sequence[Way]) -> tuple[int, list[int], int]:
    return len(choice), sorted(option.kind for option in choice), sum(option.strength for option in choice)


def _layouts_that_can_fit(setting: Setting) -> list[Way | None]:
    """The given layout (None) and others, without those that do not fit even with everything else at its smallest."""
    strongest = [option for options in WAYS_TO_NEED_LESS for option in options(setting)[-1:]]
    least = {name: value for option in strongest for name, value in option.values.items()}
    return [
        option
        for option in (None, *setting.backend.ways_to_need_less(setting))
        if (plan := _planned(setting, least | (option.values if option else {}))) and plan.has_room
    ]


def _checkpointing(setting: Setting) -> list[Way]:
    """Recompute whole blocks (kind 1), then also keep their inputs on the host (kind 3)."""
    kinds = {"full": 1, "offload": 3} if setting.on_cuda else {"full": 1}
    return [
        Way(kind=kind, strength=1, values={"activation_checkpointing": mode} | _freed(setting))
        for mode, kind in kinds.items()
        if kind > kinds.get(setting.config.memory.activation_checkpointing, 0)
    ]


def _freed(setting: Setting) -> dict[str, Any]:
    """Flags that another --activation_checkpointing would refuse, at their defaults."""
    memory, flags = setting.config.memory, flags_of(type(setting.config))
    names = ("activation_checkpointing_modules", "activation_memory_budget")
    return {name: flags[name].default for name in names if getattr(memory, name) != flags[name].default}


def _microbatches(setting: Setting) -> list[Way]:
    """Smaller microbatches and more of them, so that the global batch stays; shorter packs for GRPO."""
    config = setting.config
    smaller: list[dict[str, Any]] = []
    if isinstance(config, GRPOConfig):
        tokens = config.max_tokens_per_microbatch
        while tokens > config.data.max_seq_length:
            tokens = max(tokens // 2, config.data.max_seq_length)
            smaller.append({"pack_length": tokens})
        return _ever_stronger(2, smaller)
    rows, num_microbatches = config.optim.per_device_train_batch_size, config.optim.gradient_accumulation_steps
    for fewer in reversed(divisors(rows)[:-1]):
        more = num_microbatches * (rows // fewer)
        smaller.append({"per_device_train_batch_size": fewer, "gradient_accumulation_steps": more})
    return _ever_stronger(2, smaller)


def _engine_shares(setting: Setting) -> list[Way]:
    """Less of the GPU for an engine that shares it (kind 6), as long as the cache holds a sequence of full length."""
    config, shape = setting.config, setting.shape
    if not isinstance(config, GRPOConfig) or not config.parallel.single_gpu_mode:
        return []
    sync_bytes = setting.workload(setting.layout).sync_bytes_per_param
    cache_bytes = 2 * shape.num_layers * shape.kv_width * config.data.max_seq_length * sync_bytes
    fleet = config.fleet
    if fleet.vllm_kv_cache_mib is not None:
        halves = [fleet.vllm_kv_cache_mib >> times for times in range(1, fleet.vllm_kv_cache_mib.bit_length())]
        return _ever_stronger(6, [{"vllm_kv_cache_mib": mib} for mib in halves if mib * MIB >= cache_bytes])
    least = (shape.num_params * sync_bytes + cache_bytes) / setting.device.memory_bytes
    shares, now = (twentieths / 20 for twentieths in range(19, 0, -1)), fleet.vllm_gpu_memory_utilization
    return _ever_stronger(6, [{"vllm_gpu_memory_utilization": share} for share in shares if least <= share < now])


def _reductions(setting: Setting) -> list[Way]:
    """Gradients that are reduced after every microbatch: the mildest change of all."""
    is_last = setting.config.parallel.gradient_reduction == "last"
    return [Way(kind=0, strength=0, values={"gradient_reduction": "every"})] if is_last else []


def _ever_stronger(kind: int, all_values: Sequence[dict[str, Any]]) -> list[Way]:
    """A `Way` for each of the values, in their order."""
    return [Way(kind=kind, strength=index, values=values) for index, values in enumerate(all_values, start=1)]


WAYS_TO_NEED_LESS = (_reductions, _checkpointing, _microbatches, _engine_shares)


def _useful_nodes(setting: Setting) -> Iterator[dict[str, Any]]:
    """The given nodes, then twice as many, and so on; only the given ones where more would not help."""
    yield {}
    parallel = setting.config.parallel
    if len(set(setting.gpus_per_node)) != 1 or parallel.single_gpu_mode:
        return
    # If both degrees are given, they fix the number of GPUs.
    both = parallel.fsdp_shard_degree is not None and parallel.fsdp_num_replicas is not None
    freed = {"fsdp_num_replicas": None} if both else {}
    most_times = min(MAX_TIMES_THE_NODES, MAX_GPUS // sum(setting.gpus_per_node))
    doublings, num_nodes = range(1, most_times.bit_length()), len(setting.gpus_per_node)
    steps = [{"num_nodes": num_nodes * 2**times} | freed for times in doublings]
    most = _planned(setting, steps[-1]) if steps else None
    if most is not None and _layouts_that_can_fit(most.setting):
        yield from steps


def _planned(setting: Setting, values: dict[str, Any]) -> Plan | None:
    with suppress(InputError):
        return plan_of(setting.with_flags(values))
    return None
