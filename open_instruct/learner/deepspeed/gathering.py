"""What stage 3 gathers, call by call, and how much of the model is whole at once. Without torch, and without DeepSpeed.

Source, in DeepSpeed 0.19: `PartitionedParameterCoordinator`, which from its second pass on knows the order in which
modules run. Before a module runs it gathers what is missing of its parameters in one call, and in another what comes
next, up to a bucket and to the most that may be whole. After it, it lets go of what is not needed again soon. What to
let go of it works out once for every place in the order, and keeps that, also when the order has become another: a run
whose first passes go forward alone lets go of weights that it needs again at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from open_instruct.learner.deepspeed.planned_state import Zero
from open_instruct.planning.subject.model import ModelShape

HEAD = "lm_head"


class Visit(NamedTuple):
    """A module is entered, or left."""

    module: str
    is_entered: bool = True
    goes_back: bool = False


class Gathered(NamedTuple):
    """How often parameters were gathered together in a step, and whether from their second copies nearby.

    `most_values` were whole at once, with those of one call beside them.
    """

    calls: Counter[tuple[tuple[str, ...], bool]]
    most_values: int = 0


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Modules of a model in the order in which they run, by the name that each has in OLMo-core."""

    shape: ModelShape
    is_recomputed: bool = False

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Values of each parameter."""
        return {parameter.name: parameter.num_params for parameter in self.shape.parameters}

    @cached_property
    def own(self) -> dict[str, tuple[str, ...]]:
        """The parameters that a module is gathered with, in the order of the model: its own, of the head all."""
        own: dict[str, tuple[str, ...]] = defaultdict(tuple)
        own[HEAD] = ("embeddings.weight",) if self.shape.is_tied else ()
        for name in self.sizes:
            own[HEAD if name.startswith(HEAD) else name.rpartition(".")[0]] += (name,)
        return own

    @cached_property
    def num_below(self) -> dict[str, int]:
        """Values of a module and of all within it, which is what it looks over that looks from the head."""
        below: dict[str, int] = defaultdict(int)
        for module, names in self.own.items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                below[".".join(parts[:end])] += sum(self.sizes[name] for name in names)
        return below

    def forward(self) -> Iterator[Visit]:
        """All modules, those without parameters too: whichever runs, something may be fetched ahead."""
        yield from (Visit(""), *_run("embeddings"))
        for layer in range(self.shape.num_layers):
            yield from self._block(f"blocks.{layer}")
        yield from _run(HEAD)

    def backward(self) -> Iterator[Visit]:
        """Nothing needs the gradient of what the embeddings are given, so nothing is let go of after them.

        Nor that of embeddings that are frozen, and of a norm that is given those.
        """
        yield from (Visit("", goes_back=True), *_run(HEAD, goes_back=True))
        for layer in reversed(range(self.shape.num_layers)):
            yield from self._block_backward(f"blocks.{layer}")
        if self.shape.adapters is None:
            yield Visit("embeddings", goes_back=True)

    def _block(self, block: str) -> Iterator[Visit]:
        """One that is recomputed is entered by its wrapper and by itself."""
        yield from [Visit(block)] * (1 + self.is_recomputed)
        for name, within in self._sublayers():
            yield from _nested(f"{block}.{name}", within)

    def _block_backward(self, block: str) -> Iterator[Visit]:
        """Recomputation starts where a value is needed that was not kept, and ends with the last of those."""
        visits = list[Visit]()
        for name, within in reversed(self._sublayers()):
            visits += _nested(f"{block}.{name}", within, goes_back=True)
        if self.shape.adapters is not None and block == "blocks.0" and not self.shape.is_olmo:
            del visits[-2:]
        yield from [Visit(block, goes_back=True)] * (1 + self.is_recomputed)
        if self.is_recomputed:
            last = Visit(f"{block}.feed_forward_norm" if self.shape.is_olmo else f"{block}.feed_forward.w2")
            start, again = visits.index(last._replace(goes_back=True)) + 1, list(self._block(block))[1:]
            visits[start:start] = again[: again.index(last) + 1]
        yield from visits

    def _sublayers(self) -> list[tuple[str, list[str]]]:
        """What a block calls, with what that calls."""
        norms = [] if self.shape.qk_norm == "none" else ["q_norm", "k_norm"]
        attention = ["w_q", "w_k", "w_v", *norms, "rope", "backend", "w_out"]
        called = list[tuple[str, list[str]]]()
        for name, within in (("attention", attention), ("feed_forward", ["w1", "w3", "w2"])):
            pair: list[tuple[str, list[str]]] = [(name, within), (f"{name}_norm", [])]
            called += [*(pair if self.shape.is_olmo else pair[::-1]), (f"{name}_residual_stream", ["dropout"])]
        return called


def _run(module: str, *, goes_back: bool = False) -> list[Visit]:
    return [Visit(module, is_entered, goes_back) for is_entered in (True, False)]


def _nested(module: str, within: list[str], *, goes_back: bool = False) -> list[Visit]:
    """Backwards RoPE is entered for queries and for keys."""
    (entered, left), visits = _run(module, goes_back=goes_back), list[Visit]()
    for name in within[::-1] if goes_back else within:
        inner = _run(f"{module}.{name}", goes_back=goes_back)
        visits += inner[:1] * (goes_back and name == "rope") + inner
    return [entered, *visits, left]


@lru_cache(maxsize=256)
def gathered_in_step(modules: Modules, zero: Zero, num_passes: tuple[int, int], *, begins_forward: bool) -> Gathered:
    """A step of passes that go forward alone, and then of such that go back as well.

    Args:
        num_passes: how many of each.
        begins_forward: the run's first passes went forward alone.
    """
    forward, training, let_go = list(modules.forward()), [*modules.forward(), *modules.backward()], dict[Any, Any]()
    if begins_forward:
        _Step(modules, zero, forward, let_go).run(forward)
    step = _Step(modules, zero, training, let_go)
    for visits in [forward] * num_passes[0] + [training] * num_passes[1]:
        step.run(visits)
    return Gathered(step.calls, step.most_values)


class _Step:
    def __init__(self, modules: Modules, zero: Zero, order: Sequence[Visit], let_go: dict[Any, frozenset[str]]) -> None:
        self.modules, self.zero, self.let_go, self.own = modules, zero, let_go, modules.own
        self.entered = [visit.module for visit in order if visit.is_entered]
        # Of each parameter in the order in which they are needed, and by which module.
        self.needed = [(name, at) for at, module in enumerate(self.entered) for name in self.own[module]]
        self.persistent = {name for name, size in modules.sizes.items() if size <= zero.param_persistence_threshold}
        self.whole, self.calls = set(self.persistent), Counter[tuple[tuple[str, ...], bool]]()
        # Second copies last until the step; those of what is frozen for ever.
        self.frozen = {each.name for each in modules.shape.parameters if not each.is_trained}
        self.copied = set(self.frozen) if zero.nearby > 1 else set[str]()
        self.most_values = self.size(self.whole)
        self.num_own = {module: self.size(names) for module, names in self.own.items()}

    def size(self, names: Sequence[str] | set[str]) -> int:
        return sum(map(self.modules.sizes.__getitem__, names))

    def run(self, visits: Sequence[Visit]) -> None:
        """One pass. What was fetched ahead and not used is let go of at its end."""
        self.queue, self.fetched_for = deque(self.needed), defaultdict[str, int](lambda: -1)
        self.in_flight, self.in_use, self.num_live, self.at = set[str](), defaultdict[str, set[str]](set), 0, 0
        self.going_back, self.used_again = dict[str, None](), defaultdict[str, set[str]](set)
        self.num_before = self.size(self.whole)
        for visit in visits:
            (self._enter if visit.is_entered else self._leave)(*visit[::2])
        # After one that went back there is nothing that comes after it.
        self.whole = set(self.persistent) if visits[-1].module != HEAD else self.whole - self.in_flight

    def _enter(self, module: str, goes_back: bool) -> None:
        own = self.own[module]
        self.going_back |= {module: None} if goes_back else {}
        self._gather([name for name in own if name not in self.whole])
        self.in_flight -= set(own)
        for name in own:
            self.in_use[name].add(module)
            # What is frozen, and needed to compute again, lasts as long as the module whose gradient asked for that.
            if name in self.frozen and self.going_back and not goes_back:
                self.in_use[name].add(asks := next(reversed(self.going_back)))
                self.used_again[asks].add(name)
        for _ in range(sum(self.fetched_for[name] < self.at for name in own)):
            name, self.fetched_for[name] = self.queue.popleft()
        room = min(self.zero.max_live_parameters - self.num_live, self.zero.prefetch_bucket_size)
        ahead = list[str]()
        while self.queue and self.size(ahead) < room:
            name, at = self.queue.popleft()
            self.fetched_for[name] = max(self.fetched_for[name], at)
            ahead += [name] if name not in self.whole and name not in ahead else []
        self._gather(ahead)
        self.in_flight |= set(ahead)
        self.at += 1

    def _gather(self, names: Sequence[str]) -> None:
        for is_nearby in (True, False):
            if together := tuple(name for name in names if (name in self.copied) is is_nearby):
                self.calls[together, is_nearby] += 1
        self.num_live += self.size(names)
        self.whole |= set(names)
        self.most_values = max(self.most_values, self.num_before + self.num_live + self.size(names))

    def _leave(self, module: str, goes_back: bool) -> None:
        own, place, again = self.own[module], (module, self.at), set[str]()
        if place not in self.let_go:
            self.let_go[place] = frozenset(self._not_needed_soon(module, own))
        if goes_back:
            self.going_back.pop(module, None)
            again = self.used_again.pop(module, again) - self.persistent
        for name in again.union(own):
            self.in_use[name].discard(module)
            if name in self.let_go[place] | again and name in self.whole - self.in_flight and not self.in_use[name]:
                self.whole.remove(name)
                self.num_live -= self.modules.sizes[name]
                self.copied |= {name} if self.zero.nearby > 1 else set()

    def _not_needed_soon(self, module: str, own: Sequence[str]) -> set[str]:
        free = {name for name in own if name not in self.persistent and self.fetched_for[name] <= self.at}
        num_passed, looks_within = 0, module == HEAD
        for later in self.entered[self.at :]:
            if num_passed >= self.zero.max_reuse_distance or not free:
                break
            if looks_within and later == "":
                return set()
            # Looking from another module it does not see those of the head, which lie within it.
            if looks_within or later != HEAD:
                free.difference_update(self.own[later])
                num_passed += (self.modules.num_below if looks_within else self.num_own).get(later, 0)
        return free
