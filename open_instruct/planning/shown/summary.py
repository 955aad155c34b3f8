"""What a plan says in words, the same on the terminal, in HTML and in the log of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from open_instruct.parallel.wording import nodes_text
from open_instruct.planning.memory.phases import Phase
from open_instruct.planning.plan import Plan
from open_instruct.planning.subject.devices import MEMORY, Device
from open_instruct.planning.subject.units import GIB, billions, gib, seconds
from open_instruct.planning.traffic.per_step import Exchange
from open_instruct.planning.traffic.step_time import ON_THE_PATH
from open_instruct.wording import counted

# Axes whose groups may leave a node.
MEANT_TO_CROSS = ("replica", "sync", "world", "all")

# The parts of a GPU's memory: the letter, the colours and the meaning of each, in the order in which they are drawn.
PARTS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("parts.json").read_text("utf-8"))
LETTERS = {label: part["letter"] for label, part in PARTS.items()}


def headline(plan: Plan) -> str:
    """What is planned, on what."""
    setting, workload = plan.setting, plan.workload
    name, num_params = setting.config.model.model_name_or_path, billions(setting.shape.num_params)
    what = f"{workload.algorithm.upper()} of {name} ({num_params} parameters)"
    machines = f"{nodes_text(plan.layout.gpus_per_node)} ({device_text(setting.device)})"
    if workload.num_engines and not workload.shares_device:
        engines = counted(workload.num_engines, "engine")
        machines += f", and {engines} of {counted(workload.engine_tensor_degree, 'GPU')}"
    return f"{what} on {machines}"


def device_text(device: Device) -> str:
    """ "H100, 79.1 GiB each"; a GPU without a name has an H100's speeds."""
    memory = f"{device.memory_gib:g} GiB each"
    return f"{memory}, speeds of an H100" if device.name.startswith(MEMORY) else f"{device.name.upper()}, {memory}"


def fit_line(plan: Plan) -> str:
    """Whether it fits, in one line."""
    peak, memory = gib(plan.peak.total_bytes), gib(plan.setting.device.memory_bytes)
    needs = f"needs {peak} of {memory} GiB on each GPU (most in: {plan.peak.name})"
    if plan.fits:
        return f"fits{'' if plan.has_room else ', but barely'}: {needs}, {gib(plan.headroom_bytes)} GiB are left"
    return f"does not fit: {needs}, {gib(-plan.headroom_bytes)} GiB too much"


def work_lines(plan: Plan) -> Iterator[str]:
    """What each GPU does in a step."""
    workload = plan.workload
    updates = f"{counted(workload.num_updates, 'update')} of " if workload.num_updates > 1 else ""
    yield (
        f"each step: {updates}{counted(workload.num_microbatches, 'microbatch')} of "
        f"{workload.tokens_per_microbatch:,} tokens on each data-parallel rank, "
        f"{plan.tokens_per_step:,} tokens in all, sequences up to {workload.longest_sequence:,}"
    )
    if workload.pack_tokens > workload.tokens_per_microbatch:
        yield f"memory is planned for rows of {workload.pack_tokens:,} tokens, which shorter sequences can fill"
    if workload.shared_prefix_tokens:
        yield (
            f"prompts of {workload.shared_prefix_tokens + 1:,} tokens are computed once for "
            f"{counted(workload.documents_per_group, 'reply')}: {workload.tokens_per_microbatch:,} tokens in a row "
            f"stand for {workload.row_tokens_per_microbatch:,}"
        )
    if (adapters := plan.setting.shape.adapters) is not None:
        trained = billions(plan.setting.shape.num_trained)
        yield f"adapters of rank {adapters.rank} are trained, {trained} parameters, beside the frozen model"
    checkpointing = {
        "none": "every activation is kept",
        "full": "whole blocks are recomputed",
        "offload": "whole blocks are recomputed from inputs on the host",
        "selected_modules": f"recomputed: {', '.join(workload.checkpointing_modules)}",
    }[workload.checkpointing]
    if plan.is_chosen and (mode := workload.checkpointing) != "none":
        why = "with less the run does not fit, with room"
        checkpointing += f" (--activation_checkpointing auto takes {mode}: {why})"
    if workload.activation_memory_budget < 1:
        checkpointing = f"the compiler keeps {workload.activation_memory_budget:g} of the activations"
    yield f"computed in {workload.param_dtype}, optimizer {workload.optimizer}, {checkpointing}"
    if plan.setting.backend.sharing:
        yield plan.setting.backend.sharing
    if plan.host.parts:
        parts = ", ".join(f"{gib(num_bytes)} GiB for {label}" for label, num_bytes in plan.host.parts)
        yield f"host memory of each GPU's process: {parts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """All exchanges of one kind in one kind of group, `first` among them."""

    what: str
    num_calls: int
    num_bytes: int
    sent_bytes: int
    first: Exchange

    @property
    def reach(self) -> str:
        """Among how many GPUs, and whether they leave the node."""
        return f"{self.first.group_size} {'across nodes' if self.first.crosses_nodes else 'in a node'}"


def traffic_rows(plan: Plan) -> list[TrafficRow]:
    """The exchanges of a step by what they are, the largest first; those of a group of one send nothing."""
    together: dict[tuple[str, str, str], list[Exchange]] = {}
    for exchange in plan.exchanges:
        if exchange.group_size > 1:
            together.setdefault((exchange.axis, exchange.collective, exchange.what), []).append(exchange)
    numbers = ("num_calls", "num_bytes", "sent_bytes")
    rows = [
        TrafficRow(what=what, first=each[0], **{name: sum(getattr(one, name) for one in each) for name in numbers})
        for (_, _, what), each in together.items()
    ]
    return sorted(rows, key=lambda row: -row.sent_bytes)


def time_lines(plan: Plan) -> Iterator[str]:
    """The bound and what it is made of."""
    time, device = plan.time, plan.setting.device
    yield (
        f"{seconds(time.step_s)}, bound by {time.bound_by}: {plan.tokens_per_second:,.0f} tokens/s on all GPUs "
        "where rows have their full length."
    )
    yield (
        f"Arithmetic takes {seconds(time.compute_s)} (at {plan.setting.mfu:.0%} of {device.peak_tflops_bf16:g} "
        f"TFLOP/s), exchanges {seconds(time.in_node_s)} within nodes (at {device.in_node_gb_s:g} GB/s) and "
        f"{seconds(time.cross_node_s)} across nodes (at {device.cross_node_gb_s:g} GB/s for each GPU)."
    )
    axes = {exchange.axis for exchange in plan.exchanges if exchange.wire_bytes}
    waited_for = ", ".join(name for axis, name in ON_THE_PATH.items() if axis in axes)
    waited = f"Arithmetic waits for {seconds(time.waiting_s)} of them ({waited_for}). "
    others = f"{waited}The others" if time.waiting_s > 0 else "They"
    yield f"{others} are taken to overlap with it in full, so a real step takes longer."
    if plan.workload.num_engines:
        yield "That is the learners' part of a step; the engines generate beside it."


def notes_on(plan: Plan) -> list[str]:
    """What speaks against a layout of the ranking, in few words."""
    layout, splits_tensors = plan.layout, bool(plan.layout.straddling(plan.layout.tensor_groups))
    across = "tensor groups across nodes" if splits_tensors else "across nodes"
    notes = {"does not fit": not plan.fits, across: splits_tensors or layout.straddles_nodes}
    return [note for note, holds in notes.items() if holds]


def unit_of(plan: Plan) -> tuple[str, int]:
    """The unit that suits a plan, by name and in bytes."""
    return ("GiB", GIB) if plan.peak.total_bytes >= GIB else ("MiB", 2**20)


def parts_of(phase: Phase, plan: Plan) -> list[tuple[str, int]]:
    """Label and bytes of what is there, in the order of `LETTERS`, but for what would read as 0.00."""
    parts, least = dict(phase.parts), 0.005 * unit_of(plan)[1]
    return [(label, parts[label]) for label in LETTERS if parts.get(label, 0) >= least]


def parts_in_any(plan: Plan) -> list[str]:
    """The labels that any phase shows, in the same order."""
    shown = {label for phase in plan.phases for label, _ in parts_of(phase, plan)}
    return [label for label in LETTERS if label in shown]
