"""What stands behind an engine's loop: something that makes tokens, and the processes that hold its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol

from open_instruct.engines.requests import GenerationRequest
from open_instruct.records import Completion

P = ParamSpec("P")


class WeightWorker(Protocol):
    """What every process of an engine that holds weights can do; see `WeightReceiver`."""

    def open_channel(self, info: dict[str, Any]) -> None: ...

    def start_update(self) -> None: ...

    def receive_weights(self) -> None: ...

    def finish_update(self) -> None: ...


class Core(Protocol):
    """What makes the tokens. All its methods are called from one thread."""

    def add(self, key: int, request: GenerationRequest) -> None:
        """Begin a request; a ValueError says why it cannot be."""

    def abort(self, key: int) -> None:
        """Give a request up."""

    def step(self) -> Mapping[int, Completion]:
        """Make one token for each request; returns those that are finished with it."""

    def settle(self) -> Mapping[int, Completion]:
        """Take in what is on its way, after which nothing is computed until the next step; returns as `step` does."""

    def call_workers(
        self, method: Callable[Concatenate[WeightWorker, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method in every process that holds weights."""

    def weights_changed(self, version: int) -> None:
        """Tokens are of `version` from now on; nothing computed with other weights is used again."""

    def close(self) -> None: ...
