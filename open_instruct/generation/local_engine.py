"""An engine in this process, without Ray: one model, for as long as the process lives."""

from collections.abc import Callable
from typing import Any, cast

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.generation.engine import Engine, EngineMethod, P, R
from open_instruct.generation.engine_host import RayEngine
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.requests import EngineSettings


class LocalEngine:
    """An engine as a pool asks it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(
        self,
        timeout_s: float,
        method: EngineMethod[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the engine; it is in this process, and answers in its time."""
        return method(self._engine, *args, **kwargs)

    def tell(self, method: EngineMethod[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        method(self._engine, *args, **kwargs)

    def kill(self) -> None:
        """Leave it, as it ends with the process."""


def open_local_pool(
    settings: EngineSettings, *, on_failure: Callable[[RunError], None]
) -> EnginePool:
    """A pool of one engine of this process, which is not started again where it fails.

    Args:
        settings: of the engine.
        on_failure: is told once it has failed.
    """

    def refuse_restart(index: int) -> RayEngine:
        raise RunError("the engine of this process is not started again")

    handle: Any = LocalEngine(Engine(settings))
    fleet = FleetSection(engine_timeout_s=settings.fleet.engine_timeout_s, max_restarts=0)
    return EnginePool(
        [cast(RayEngine, handle)],
        make_engine=refuse_restart,
        on_restart=lambda index: None,
        on_failure=on_failure,
        fleet=fleet,
        say=lambda text: None,
    )
