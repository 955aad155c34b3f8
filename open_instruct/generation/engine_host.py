"""The driver's handle on an engine in a Ray actor."""

from collections.abc import Mapping

from open_instruct.cluster.actor_handle import ActorHandle
from open_instruct.cluster.placement import Placement
from open_instruct.generation.engine import Engine
from open_instruct.generation.requests import EngineSettings


class RayEngine(ActorHandle[Engine]):
    """One engine, in its process, which starts at once; see `wait_ready`."""

    def __init__(
        self,
        index: int,
        settings: EngineSettings,
        placement: Placement,
        *,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(
            Engine,
            {"settings": settings},
            name=f"engine {index}",
            actor_class="VLLMEngine",
            options=placement.engine_options(index),
            environment=environment,
            placement=placement,
        )
        self.index = index
