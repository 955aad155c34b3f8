"""Every way to place learners and engines on a set of GPUs, and which of them a run takes."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from open_instruct.config.flags import spell_value
from open_instruct.core.errors import InputError
from open_instruct.planning.placements import Kind, Placement, find_engine_work
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.setting import Setting

DEGREES = (1, 2, 4, 8)


def list_placements(
    setting: Setting, nodes: Sequence[int], *, tokens_per_second: float | None = None
) -> Iterator[Placement]:
    """Every placement of a GRPO run on these GPUs that its other flags allow.

    Args:
        setting: of the run; its nodes are replaced.
        nodes: all GPUs of each node.
        tokens_per_second: what a GPU of an engine generates, where that was measured.
    """
    config, work = find_engine_work(setting, tokens_per_second=tokens_per_second)
    given_degree = config.fleet.vllm_tensor_parallel_size
    degrees = [given_degree]
    if given_degree == 1:
        degrees = [each for each in DEGREES if setting.shape.num_heads % each == 0]
    for learners in _list_learners(nodes):
        plan = _plan_learners(setting, learners, nodes)
        if plan is None:
            continue
        for degree in degrees:
            for kind, num_engine_gpus in _list_kinds(learners, nodes, degree):
                yield Placement(
                    kind=kind,
                    plan=plan,
                    work=work,
                    learners=learners,
                    engines=num_engine_gpus // degree,
                    degree=degree,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """The fastest placement of each kind that fits, or else the one that needs least; and one.

    `asked` is the value of --placement.
    """

    asked: Literal["split", "shared", "mixed", "auto"]
    nodes: tuple[int, ...]
    best: tuple[Placement, ...]  # the fastest that fits first
    chosen: Placement

    @property
    def runner_up(self) -> Placement | None:
        """The best placement that fits beside the chosen one."""
        for placement in self.best:
            if placement.fits and placement is not self.chosen:
                return placement
        return None


def choose_placement(
    setting: Setting,
    nodes: Sequence[int],
    *,
    asked: Literal["split", "shared", "mixed", "auto"],
    tokens_per_second: float | None = None,
) -> PlacementChoice:
    """Compare the placements of a GRPO run on these GPUs; see `list_placements` for the arguments.

    Raises:
        InputError: there is none of the kind that is asked for.
    """
    setting = setting.with_flags({"placement": "split", "vllm_num_engines": 1})
    placements = list_placements(setting, nodes, tokens_per_second=tokens_per_second)
    best: dict[Kind, Placement] = {}
    for placement in sorted(placements, key=_rank):
        best.setdefault(placement.kind, placement)
    for placement in best.values():
        if asked in ("auto", placement.kind):
            chosen = replace(placement, plan=make_plan(placement.set_flags(placement.plan.setting)))
            best[placement.kind] = chosen
            return PlacementChoice(
                asked=asked,
                nodes=tuple(nodes),
                best=tuple(best.values()),
                chosen=chosen,
            )
    raise InputError(
        f"--placement {asked}: the other flags leave no such placement of learners and engines on "
        f"nodes of {spell_value(list(nodes))} GPUs; give more GPUs, or fewer sharding flags",
        kind="layout",
    )


def _rank(placement: Placement) -> tuple[bool, float, int]:
    if not placement.fits:
        return True, float(max(placement.phase_bytes.values())), placement.degree
    return False, placement.step_s, placement.degree


def _list_learners(nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Learners of each node: as many on all nodes, or all GPUs of the first ones."""
    for number in range(1, min(nodes) + 1):
        yield (number,) * len(nodes)
    for num_nodes in range(1, len(nodes)):
        yield (*nodes[:num_nodes], *[0] * (len(nodes) - num_nodes))


def _list_kinds(
    learners: tuple[int, ...], nodes: Sequence[int], degree: int
) -> Iterator[tuple[Kind, int]]:
    """The kinds that such learners allow, each with its GPUs of engines.

    No engine spans nodes, nor GPUs with a learner and without.
    """
    free = [size - number for size, number in zip(nodes, learners, strict=True)]
    fits_beside = all(number % degree == 0 for number in free)
    fits_within = all(number % degree == 0 for number in learners)
    if sum(free) and fits_beside:
        yield "split", sum(free)
    if not sum(free) and fits_within:
        yield "shared", sum(learners)
    if sum(free) and fits_beside and fits_within:
        yield "mixed", sum(nodes)


def _plan_learners(
    setting: Setting, learners: tuple[int, ...], nodes: Sequence[int]
) -> Plan | None:
    """The plan of so many learners; None where the flags cannot shard the model over them."""
    sizes = tuple(each for each in learners if each)
    has_engines_in_node = len(nodes) == 1
    with suppress(InputError):
        others = replace(setting, gpus_per_node=sizes, has_engines_in_node=has_engines_in_node)
        return make_plan(others.with_flags({}))
    return None
