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

from open_instruct.learner.deepspeed.planned_state import Zero
from open_instruct.planning.subject.model import ModelShape

HEAD = "lm_head"
LetGo = dict[tuple[str, int], frozenset[str]]


class Visit(NamedTuple):
    """A module is entered, or left."""

    module: str
    is_entered: bool = True


class Call(NamedTuple):
    """Parameters that are gathered together; `is_nearby` from their second copies."""

    parameters: tuple[str, ...]
    is_nearby: bool


class Gathered(NamedTuple):
    """Calls of a step, and the most values that were whole at once, with those of one call beside them."""

    calls: tuple[Call, ...] = ()
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
        """The parameters that a module is gathered with: its own, of the head all."""
        own: dict[str, tuple[str, ...]] = defaultdict(tuple)
        for name in self.sizes:
            own[HEAD if name.startswith(HEAD) else name.rpartition(".")[0]] += (name,)
        own[HEAD] += ("embeddings.weight",) if self.shape.is_tied else ()
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
        yield from (Visit(""), *_run("embeddings"))
        for layer in range(self.shape.num_layers):
            yield from self._block(f"blocks.{layer}")
        yield from _run(HEAD)

    def backward(self) -> Iterator[Visit]:
        """Nothing needs the gradient of what the embeddings are given, so nothing is let go of after them."""
        yield from (Visit(""), *_run(HEAD))
        for layer in reversed(range(self.shape.num_layers)):
            yield from self._block_backward(f"blocks.{layer}")
        yield Visit("embeddings")

    def _block(self, block: str) -> Iterator[Visit]:
        """One that is recomputed is entered by its wrapper and by itself."""
        yield from [Visit(block)] * (1 + self.is_recomputed)
        for name, within in self._sublayers():
            yield from _nested(f"{block}.{name}", within)

    def _block_backward(self, block: str) -> Iterator[Visit]:
        """Recomputation starts where a value is needed that was not kept, and ends with the last of those."""
        visits = [
            each for name, within in reversed(self._sublayers()) for each in _nested(f"{block}.{name}", within, -1)
        ]
        yield from [Visit(block)] * (1 + self.is_recomputed)
        if self.is_recomputed:
            last = Visit(f"{block}.feed_forward_norm" if self.shape.is_olmo else f"{block}.feed_forward.w2")
            start, again = visits.index(last) + 1, list(self._block(block))[1:]
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


def _run(module: str) -> tuple[Visit, Visit]:
    return Visit(module), Visit(module, is_entered=False)


def _nested(module: str, within: list[str], direction: int = 1) -> Iterator[Visit]:
    """Backwards RoPE is entered for queries and for keys."""
    yield Visit(module)
    for name in within[::direction]:
        yield from [Visit(f"{module}.{name}")] * (direction < 0 and name == "rope")
        yield from _run(f"{module}.{name}")
    yield Visit(module, is_entered=False)


@lru_cache(maxsize=256)
def gathered_in_step(
    modules: Modules, zero: Zero, *, num_forward: int, num_training: int, begins_forward: bool
) -> Gathered:
    """A step of passes that go forward alone, then of such that go back as well.

    Args:
        begins_forward: the run's first passes went forward alone.
    """
    forward, training, let_go = list(modules.forward()), [*modules.forward(), *modules.backward()], LetGo()
    if begins_forward:
        _Step(modules, zero, forward, let_go).run(forward)
    step = _Step(modules, zero, training, let_go)
    for visits in [forward] * num_forward + [training] * num_training:
        step.run(visits)
    return Gathered(tuple(step.calls), step.most_values)


class _Step:
    def __init__(self, modules: Modules, zero: Zero, order: Sequence[Visit], let_go: LetGo) -> None:
        self.modules, self.zero, self.let_go = modules, zero, let_go
        self.entered = [visit.module for visit in order if visit.is_entered]
        # Of each parameter in the order in which they are needed, and by which module.
        self.needed = [(name, at) for at, module in enumerate(self.entered) for name in sorted(self.own(module))]
        self.persistent = {name for name, size in modules.sizes.items() if size <= zero.param_persistence_threshold}
        self.whole, self.copied, self.calls = set(self.persistent), set[str](), list[Call]()
        self.most_values = self.size(self.whole)

    def own(self, module: str) -> tuple[str, ...]:
        return self.modules.own.get(module, ())

    def size(self, names: Sequence[str] | set[str]) -> int:
        return sum(self.modules.sizes[name] for name in names)

    def run(self, visits: Sequence[Visit]) -> None:
        """One pass. What was fetched ahead and not used is let go of at its end."""
        self.queue, self.fetched_for = deque(self.needed), defaultdict[str, int](lambda: -1)
        self.in_flight, self.in_use, self.num_live, self.at = set[str](), defaultdict[str, set[str]](set), 0, 0
        for visit in visits:
            (self._enter if visit.is_entered else self._leave)(visit.module)
        went_back = visits[-1].module != HEAD  # then there is nothing that comes after it
        self.whole = set(self.persistent) if went_back else self.whole - self.in_flight

    def _enter(self, module: str) -> None:
        own = self.own(module)
        self._gather([name for name in own if name not in self.whole])
        self.in_flight -= set(own)
        for name in own:
            self.in_use[name].add(module)
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
                self.calls.append(Call(together, is_nearby))
        self.num_live += self.size(names)
        self.whole |= set(names)
        self.most_values = max(self.most_values, self.size(self.whole) + self.size(names))

    def _leave(self, module: str) -> None:
        own, place = self.own(module), (module, self.at)
        if place not in self.let_go:
            self.let_go[place] = frozenset(self._not_needed_soon(module, own))
        for name in own:
            self.in_use[name].discard(module)
            if name in self.let_go[place] and name in self.whole - self.in_flight and not self.in_use[name]:
                self.whole.remove(name)
                self.num_live -= self.size([name])
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
            seen = self.own(later) if looks_within or later != HEAD else ()
            free -= set(seen)
            num_passed += self.modules.num_below[later] if looks_within else self.size(seen)
        return free
