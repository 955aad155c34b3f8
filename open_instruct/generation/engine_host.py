"""The driver's handle on an engine in a Ray actor."""

from collections.abc import Mapping
from typing import Any

from open_instruct.cluster.actor_host import ActorHost
from open_instruct.cluster.learner_call import explain_loss
from open_instruct.cluster.placement import Placement
from open_instruct.core.errors import InputError, RunError
from open_instruct.generation.engine import Engine, EngineMethod, P, R
from open_instruct.generation.requests import EngineSettings

MAX_CONCURRENCY = 32  # calls that wait for completions must not keep others out


class RayEngine:
    """One engine, in its process, which starts at once; see `wait_ready`."""

    def __init__(
        self,
        index: int,
        settings: EngineSettings,
        placement: Placement,
        *,
        environment: Mapping[str, str],
    ) -> None:
        import ray

        self.index = index
        host: Any = ray.remote(type("VLLMEngine", (ActorHost,), {}))
        self._actor = host.options(
            **placement.engine_options(index), max_concurrency=MAX_CONCURRENCY
        ).remote()
        environment_set = self._actor.set_environment.remote(
            f"engine-{index}",
            dict(environment),
            meeting_address=placement.whereabouts().meeting_address(),
        )
        self._construction = self._actor.construct.remote(
            Engine, {"settings": settings}, environment_set
        )

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the engine is constructed.

        Raises:
            RunError: the engine could not be constructed, or not within `timeout_s`.
        """
        self._get(self._construction, "construction", timeout_s)

    def tell(self, method: EngineMethod[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method of the engine without waiting."""
        self._actor.call.remote(method.__name__, *args, **kwargs)

    def ask(
        self,
        timeout_s: float,
        method: EngineMethod[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the engine and return its result.

        Raises:
            RunError: the engine failed, died, or did not answer in time.
        """
        name = method.__name__
        answer: R = self._get(self._actor.call.remote(name, *args, **kwargs), name, timeout_s)
        return answer

    def kill(self) -> None:
        """End the engine's process, also while it computes."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)

    def _get(self, ref: Any, what: str, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise RunError(
                f"engine {self.index} did not answer to {what} within {timeout_s:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            kind = "" if isinstance(error.cause, RunError) else f"{type(error.cause).__name__}: "
            raise RunError(
                f"engine {self.index}, {what}: {kind}{' '.join(str(error.cause).split())}"
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(
                f"engine {self.index} was lost during {what}: {explain_loss(error)}"
            ) from None
