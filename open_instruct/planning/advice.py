"""What to change: the smallest change that makes a run fit, or the layout that makes it faster.

Nothing is advised that was not planned again with the change in it, and nothing that would leave no room at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from open_instruct.config.flags import flags_of, spelled
from open_instruct.config.grpo import GRPOConfig
from open_instruct.errors import InputError
from open_instruct.parallel.layout import divisors
from open_instruct.parallel.node_sizes import MAX_GPUS
from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.plan import Plan, Setting, Way, plan_of, ranked_layouts
from open_instruct.planning.shown.units import amount, gib, seconds
from open_instruct.planning.subject.workload import MIB

# A faster layout is named only where it is faster by more than the plan can be trusted to tell.
WORTH_A_CHANGE = 1.02
MAX_TIMES_THE_NODES = 64
REDUCED_LAST = {"gradient_reduction": "last"}


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
        """The flags, and the nodes where they change: of GRPO they are a flag too."""
        if "num_nodes" not in self.values:
            return self.flags
        nodes = self.plan.setting.gpus_per_node
        if self.plan.setting.names_learners:
            return f"--num_learners_per_node {spelled(list(nodes))} {self.flags}".rstrip()
        return f"on {nodes_text(nodes)}" + (f" with {self.flags}" if self.flags else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What could be different. `ranked` holds every layout of these GPUs, the fastest that fits first."""

    to_fit: Change | None
    faster: Change | None
    exchanges_less: Change | None
    ranked: tuple[Plan, ...]

    def lines(self, plan: Plan) -> Iterator[str]:
        """In sentences."""
        if self.to_fit is not None:
            little_room = "It fits, but leaves little room. The smallest change that leaves more"
            yield from _said(little_room if plan.fits else "The smallest change that fits", plan, self.to_fit)
        elif not plan.fits:
            yield "No flag makes it fit: take a smaller model, shorter sequences, or GPUs with more memory."
        elif self.faster is not None:
            times = self.faster.plan.tokens_per_second / plan.tokens_per_second
            yield from _said("Faster and fits", plan, self.faster, f": {times:.2f} times the tokens per second")
        else:
            yield "It fits, and no other layout of these GPUs is faster." if len(self.ranked) > 1 else "It fits."
        if self.exchanges_less is not None:
            saved = amount(plan.sent_bytes - self.exchanges_less.plan.sent_bytes)
            yield from _said("Exchanges less and fits", plan, self.exchanges_less, f", in which it sends {saved} less")


def _said(what: str, plan: Plan, change: Change, more: str = "") -> Iterator[str]:
    """A change, what the run needs with it, and its global batch where that is another."""
    peak, memory = gib(change.plan.peak.total_bytes), gib(change.plan.memory_bytes)
    yield f"{what}: {change.text}"
    yield f"It needs {peak} of {memory} GiB on each GPU, and at least {seconds(change.plan.time.step_s)} a step{more}."
    yield from other_batch(plan, change)


def other_batch(plan: Plan, change: Change) -> Iterator[str]:
    """A sentence where a change makes another global batch, as other nodes and tensor degrees do."""
    before, after = plan.tokens_per_step, change.plan.tokens_per_step
    if before != after:
        yield f"The global batch becomes {after:,} tokens, from {before:,}."


def advise(plan: Plan) -> Advice:
    """Everything that there is to say about a plan."""
    ranked = ranked_layouts(plan.setting)
    faster = faster_layout(plan, ranked) if plan.fits else None
    return Advice(to_fit=change_to_fit(plan), faster=faster, exchanges_less=fewer_reductions(plan), ranked=ranked)


def change_to_fit(plan: Plan) -> Change | None:
    """The smallest change with which the run fits with room; None where it does already or nothing found helps.

    One change comes before two. Among as many, in this order: gradients that are reduced after every microbatch, a
    larger shard degree within the node, full checkpointing, smaller microbatches, inputs of blocks on the host, a shard
    degree across nodes, a tensor degree, less for an engine on the same GPU; more GPUs come last of all.
    """
    if plan.has_room:
        return None
    for nodes in _useful_nodes(plan.setting):
        base = _planned(plan.setting, nodes)
        for values in _combinations(base.setting) if base else ():
            if base and (found := _planned(base.setting, values)) and found.has_room:
                return Change(values=nodes | values, plan=found)
    return None


def faster_layout(plan: Plan, ranked: Sequence[Plan]) -> Change | None:
    """The fastest layout that fits, where that is worth a change."""
    best = next((other for other in ranked if other.has_room), None)
    if best is None or best.tokens_per_second < plan.tokens_per_second * WORTH_A_CHANGE:
        return None
    now, then = (vars(each.setting.config.parallel) for each in (plan, best))
    return Change(values={name: value for name, value in then.items() if value != now[name]}, plan=best)


def fewer_reductions(plan: Plan) -> Change | None:
    """Gradients that are reduced once an update, where memory allows and that sends less."""
    fewer = _planned(plan.setting, REDUCED_LAST)
    is_better = fewer is not None and fewer.has_room and fewer.sent_bytes < plan.sent_bytes
    return Change(values=REDUCED_LAST, plan=fewer) if fewer and is_better else None


def _combinations(setting: Setting) -> Iterator[dict[str, Any]]:
    """Flags to try, the smallest change first."""
    slots = (_layouts_that_can_fit(setting), *([None, *options(setting)] for options in WAYS_TO_NEED_LESS))
    chosen = [[option for option in choice if option is not None] for choice in product(*slots)]
    for choice in sorted(chosen, key=_size_of_change):
        yield {name: value for option in choice for name, value in option.values.items()}


def _size_of_change(choice: Sequence[Way]) -> tuple[int, list[int], int]:
    return len(choice), sorted(option.kind for option in choice), sum(option.strength for option in choice)


def _layouts_that_can_fit(setting: Setting) -> list[Way | None]:
    """The layout as it is (None) and others, but for those that do not fit with everything else at its smallest."""
    strongest = [option for options in WAYS_TO_NEED_LESS for option in options(setting)[-1:]]
    least = {name: value for option in strongest for name, value in option.values.items()}
    return [
        option
        for option in (None, *setting.backend.ways_to_need_less(setting))
        if (plan := _planned(setting, least | (option.values if option else {}))) and plan.has_room
    ]


def _checkpointing(setting: Setting) -> list[Way]:
    """Recompute whole blocks (kind 1), and then from inputs that a GPU's host keeps (kind 3)."""
    memory, flags = setting.config.memory, flags_of(type(setting.config))
    kinds = {"full": 1, "offload": 3} if setting.on_cuda else {"full": 1}
    # What would be refused beside it goes back to its default.
    names = ("activation_checkpointing_modules", "activation_memory_budget")
    freed = {name: flags[name].default for name in names if getattr(memory, name) != flags[name].default}
    return [
        Way(kind=kind, strength=1, values={"activation_checkpointing": mode} | freed)
        for mode, kind in kinds.items()
        if kind > kinds.get(memory.activation_checkpointing, 0)
    ]


def _microbatches(setting: Setting) -> list[Way]:
    """Fewer rows at once and more of them after each other, so that the global batch stays; shorter packs for GRPO."""
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
    """Less of the GPU for an engine that shares it (kind 6), as long as a sequence of full length finds its cache."""
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
    shares = [twentieths / 20 for twentieths in range(19, 0, -1)]
    smaller = [share for share in shares if least <= share < fleet.vllm_gpu_memory_utilization]
    return _ever_stronger(6, [{"vllm_gpu_memory_utilization": share} for share in smaller])


def _reductions(setting: Setting) -> list[Way]:
    """Gradients that are reduced after every microbatch: the mildest change of all."""
    is_last = setting.config.parallel.gradient_reduction == "last"
    return [Way(kind=0, strength=0, values={"gradient_reduction": "every"})] if is_last else []


def _ever_stronger(kind: int, all_values: Sequence[dict[str, Any]]) -> list[Way]:
    """An option for each, in their order."""
    return [Way(kind=kind, strength=index, values=values) for index, values in enumerate(all_values, start=1)]


WAYS_TO_NEED_LESS = (_reductions, _checkpointing, _microbatches, _engine_shares)


def _useful_nodes(setting: Setting) -> Iterator[dict[str, Any]]:
    """The nodes as they are, then twice as many, and so on; no more of them where none would do."""
    yield {}
    parallel = setting.config.parallel
    if len(set(setting.gpus_per_node)) != 1 or parallel.single_gpu_mode:
        return
    # Both degrees together say how many GPUs there are.
    both = parallel.fsdp_shard_degree is not None and parallel.fsdp_num_replicas is not None
    freed = {"fsdp_num_replicas": None} if both else {}
    most_times = min(MAX_TIMES_THE_NODES, MAX_GPUS // sum(setting.gpus_per_node))
    doubled = [2**power for power in range(1, most_times.bit_length())]
    steps = [{"num_nodes": len(setting.gpus_per_node) * times} | freed for times in doubled]
    most = _planned(setting, steps[-1]) if steps else None
    if most is not None and _layouts_that_can_fit(most.setting):
        yield from steps


def _planned(setting: Setting, values: dict[str, Any]) -> Plan | None:
    with suppress(InputError):
        return plan_of(setting.with_flags(values))
    return None
