"""What stage 3 gathers, call by call, and how much of the model is whole at once. Without torch, and without DeepSpeed.

Source, in DeepSpeed 0.19: `PartitionedParameterCoordinator`, which from its second pass on knows the order in which
modules run. Before a module runs it gathers what is missing of its parameters in one call, and in another what comes
next, up to a bucket and to the most that may be whole. After it, it lets go of what is not needed again soon. What to
let go of it works out once for every place in the order, and keeps that, also when the order has become another: a run
whose first passes go forward alone lets go of weights that it needs again at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from open_instruct.planning.subject.model import ModelShape

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of DeepSpeed, in values; the names are its own."""

    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    param_persistence_threshold: int


class Visit(NamedTuple):
    """A module is entered, or left."""

    module: str
    is_entered: bool = True


class Call(NamedTuple):
    """Parameters that are gathered together; `is_nearby` from their second copies."""

    parameters: tuple[str, ...]
    is_nearby: bool


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Modules of a model in the order in which they run, by the name that each has in OLMo-core."""

    shape: ModelShape
    is_recomputed: bool

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Values of each parameter."""
        return {parameter.name: parameter.num_params for parameter in self.shape.parameters}

    @cached_property
    def own(self) -> dict[str, tuple[str, ...]]:
        """The parameters that a module is gathered with: its own, of the head all."""
        own: dict[str, tuple[str, ...]] = defaultdict(tuple)
        for name in self.sizes:
            module = HEAD if name.startswith(HEAD) else name.removesuffix(".weight")
            own[module] += (name,)
        if self.shape.is_tied:
            own[HEAD] += ("embeddings.weight",)
        return own

    @cached_property
    def num_below(self) -> dict[str, int]:
        """Values of a module and of all within it, which is what it looks over that looks from the head."""
        below: dict[str, int] = defaultdict(int)
        for module, names in self.own.items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                below[".".join(parts[:end])] += sum(self.sizes[name] for name in names)
        return below | {"": self.shape.num_params}

    def forward(self) -> Iterator[Visit]:
        """All modules, those without parameters too: whichever runs, something may be fetched ahead."""
        yield Visit("")
        yield from _run("embeddings")
        for layer in range(self.shape.num_layers):
            yield from self._block(layer)
        yield from _run(HEAD)

    def backward(self) -> Iterator[Visit]:
        """Nothing needs the gradient of what the embeddings are given, so nothing is let go of after them."""
        yield Visit("")
        yield from _run(HEAD)
        for layer in reversed(range(self.shape.num_layers)):
            yield from self._block_backward(layer)
        yield Visit("embeddings")

    def _children(self, block: str) -> list[str | tuple[str, list[str]]]:
        norms = ["q_norm", "k_norm"] if self.shape.qk_norm != "none" else []
        attention = ["w_q", "w_k", "w_v", *norms, "rope", "backend", "w_out"]
        sublayers: list[str | tuple[str, list[str]]] = []
        for name, modules in (("attention", attention), ("feed_forward", ["w1", "w3", "w2"])):
            pair: list[str | tuple[str, list[str]]] = [(name, modules), f"{name}_norm"]
            residual = (f"{name}_residual_stream", ["dropout"])
            sublayers += [*(pair if self.shape.is_olmo else reversed(pair)), residual]
        return sublayers

    def _block(self, layer: int) -> Iterator[Visit]:
        block = f"blocks.{layer}"
        yield Visit(block)
        if self.is_recomputed:
            yield Visit(block)  # by its wrapper and by itself
        for child in self._children(block):
            yield from _nested(block, child)

    def _block_backward(self, layer: int) -> Iterator[Visit]:
        """Recomputation starts where a value is needed that was not kept, and ends with the last of those."""
        block = f"blocks.{layer}"
        yield Visit(block)
        visits = [visit for child in reversed(self._children(block)) for visit in _nested_backward(block, child)]
        if not self.is_recomputed:
            yield from visits
            return
        last = f"{block}.feed_forward_norm" if self.shape.is_olmo else f"{block}.feed_forward.w2"
        start = visits.index(Visit(last)) + 1
        yield Visit(block)
        yield from visits[:start]
        again = list(self._block(layer))[1:]
        yield from again[: again.index(Visit(last)) + 1]
        yield from visits[start:]


def _run(module: str) -> Iterator[Visit]:
    yield Visit(module)
    yield Visit(module, is_entered=False)


def _nested(block: str, child: str | tuple[str, list[str]]) -> Iterator[Visit]:
    name, modules = (child, []) if isinstance(child, str) else child
    yield Visit(f"{block}.{name}")
    for module in modules:
        yield from _run(f"{block}.{name}.{module}")
    yield Visit(f"{block}.{name}", is_entered=False)


def _nested_backward(block: str, child: str | tuple[str, list[str]]) -> Iterator[Visit]:
    name, modules = (child, []) if isinstance(child, str) else child
    yield Visit(f"{block}.{name}")
    for module in reversed(modules):
        if module == "rope":  # of queries and of keys
            yield Visit(f"{block}.{name}.{module}")
        yield from _run(f"{block}.{name}.{module}")
    yield Visit(f"{block}.{name}", is_entered=False)


class Gathered(NamedTuple):
    """Calls of a step, and the most values that were whole at once, with those of one call beside them."""

    calls: tuple[Call, ...]
    most_values: int


@lru_cache(maxsize=256)
def gathered_in_step(
    modules: Modules, limits: Limits, *, num_forward: int, num_training: int, begins_forward: bool, has_copies: bool
) -> Gathered:
    """A step of passes that go forward alone, then of such that go back as well.

    Args:
        begins_forward: the run's first passes went forward alone.
        has_copies: neighbours keep second copies of what they gathered, until the weights change.
    """
    forward, training = list(modules.forward()), [*modules.forward(), *modules.backward()]
    let_go: dict[tuple[str, int], frozenset[str]] = {}
    if begins_forward:
        _Step(modules, limits, forward, let_go, has_copies=False).run(forward)
    step = _Step(modules, limits, training, let_go, has_copies=has_copies)
    for visits in [forward] * num_forward + [training] * num_training:
        step.run(visits)
    return Gathered(calls=tuple(step.calls), most_values=step.most_values)


class _Step:
    def __init__(
        self,
        modules: Modules,
        limits: Limits,
        order: Sequence[Visit],
        let_go: dict[tuple[str, int], frozenset[str]],
        *,
        has_copies: bool,
    ) -> None:
        self.modules, self.limits, self.let_go, self.has_copies = modules, limits, let_go, has_copies
        self.entered = [visit.module for visit in order if visit.is_entered]
        # Of each parameter in the order in which they are needed, and by which module.
        self.needed = [(name, at) for at, module in enumerate(self.entered) for name in sorted(self.own(module))]
        self.persistent = {name for name, size in modules.sizes.items() if size <= limits.param_persistence_threshold}
        self.whole, self.copied = set(self.persistent), set[str]()
        self.calls: list[Call] = []
        self.most_values = sum(map(self.size, self.whole))

    def own(self, module: str) -> tuple[str, ...]:
        return self.modules.own.get(module, ())

    def size(self, name: str) -> int:
        return self.modules.sizes[name]

    def run(self, visits: Sequence[Visit]) -> None:
        """One pass. What was fetched ahead and not used is let go of first."""
        self.queue, self.fetched_for = deque(self.needed), defaultdict[str, int](lambda: -1)
        self.in_flight, self.in_use, self.num_live, self.at = set[str](), defaultdict[str, set[str]](set), 0, 0
        for visit in visits:
            (self._enter if visit.is_entered else self._leave)(visit.module)
        self.whole -= self.in_flight
        if visits[-1].module != HEAD:  # it went back, and at its end lets go of what nothing came after
            self.whole = set(self.persistent)

    def _enter(self, module: str) -> None:
        own = self.own(module)
        self._gather([name for name in own if name not in self.whole])
        self.in_flight -= set(own)
        for name in own:
            self.in_use[name].add(module)
        num_left = sum(self.fetched_for[name] < self.at for name in own)
        for _ in range(num_left):
            name, at = self.queue.popleft()
            self.fetched_for[name] = at
        room = min(self.limits.max_live_parameters - self.num_live, self.limits.prefetch_bucket_size)
        ahead: list[str] = []
        while self.queue and sum(map(self.size, ahead)) < room:
            name, at = self.queue.popleft()
            self.fetched_for[name] = max(self.fetched_for[name], at)
            if name not in self.whole and name not in ahead:
                ahead.append(name)
        self._gather(ahead)
        self.in_flight |= set(ahead)
        self.at += 1

    def _gather(self, names: Sequence[str]) -> None:
        for is_nearby in (True, False):
            if together := tuple(name for name in names if (name in self.copied) is is_nearby):
                self.calls.append(Call(together, is_nearby))
        self.num_live += sum(map(self.size, names))
        self.whole |= set(names)
        self.most_values = max(self.most_values, sum(map(self.size, self.whole)) + sum(map(self.size, names)))

    def _leave(self, module: str) -> None:
        own = self.own(module)
        if (place := (module, self.at)) not in self.let_go:
            self.let_go[place] = frozenset(self._not_needed_soon(module, own))
        for name in own:
            self.in_use[name].discard(module)
            if name in self.let_go[place] and name in self.whole - self.in_flight and not self.in_use[name]:
                self.whole.remove(name)
                self.num_live -= self.size(name)
                if self.has_copies:
                    self.copied.add(name)

    def _not_needed_soon(self, module: str, own: Sequence[str]) -> set[str]:
        free = {name for name in own if name not in self.persistent and self.fetched_for[name] <= self.at}
        num_passed, looks_within = 0, module == HEAD
        for later in self.entered[self.at :]:
            if num_passed >= self.limits.max_reuse_distance or not free:
                break
            if looks_within and later == "":
                return set()
            # Looking from another module it does not see those of the head, which lie within it.
            seen = self.own(later) if looks_within or later != HEAD else ()
            free -= set(seen)
            num_passed += self.modules.num_below[later] if looks_within else sum(map(self.size, seen))
        return free
