"""The driver's handle on an object in a Ray actor: what is asked of it, and how it failed."""

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from open_instruct.cluster.actor_host import ActorHost
from open_instruct.cluster.learner_call import explain_loss
from open_instruct.cluster.placement import Placement
from open_instruct.core.errors import InputError, RunError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_CONCURRENCY = 32  # calls that wait for something must not keep others out


class ActorHandle(Generic[T]):
    """One object, in its process, which starts at once; see `wait_ready`.

    Args:
        what: the class of the object.
        arguments: of its construction.
        name: for messages, and as that of its log where a - stands for the space.
        actor_class: the name of the actor, as Ray shows it.
        options: of the actor: where it is.
        environment: variables, which are set before the class is imported there.
    """

    def __init__(
        self,
        what: type[T],
        arguments: Mapping[str, Any],
        *,
        name: str,
        actor_class: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        placement: Placement,
    ) -> None:
        import ray

        self._name = name
        host: Any = ray.remote(type(actor_class, (ActorHost,), {}))
        self._actor = host.options(**options, max_concurrency=MAX_CONCURRENCY).remote()
        environment_set = self._actor.set_environment.remote(
            name.replace(" ", "-"),
            dict(environment),
            meeting_address=placement.whereabouts().meeting_address(),
        )
        self._construction = self._actor.construct.remote(what, dict(arguments), environment_set)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the object is constructed.

        Raises:
            RunError: it could not be constructed, or not within `timeout_s`.
        """
        self._get(self._construction, "construction", timeout_s)

    def tell(
        self, method: Callable[Concatenate[T, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method of the object without waiting."""
        self._actor.call.remote(method.__name__, *args, **kwargs)

    def ask(
        self,
        timeout_s: float,
        method: Callable[Concatenate[T, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the object and return its result.

        Raises:
            RunError: the object failed, died, or did not answer in time.
        """
        name = method.__name__
        answer: R = self._get(self._actor.call.remote(name, *args, **kwargs), name, timeout_s)
        return answer

    def kill(self) -> None:
        """End the object's process, also while it computes."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)

    def _get(self, ref: Any, what: str, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise RunError(
                f"{self._name} did not answer to {what} within {timeout_s:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            kind = "" if isinstance(error.cause, RunError) else f"{type(error.cause).__name__}: "
            raise RunError(
                f"{self._name}, {what}: {kind}{' '.join(str(error.cause).split())}"
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(f"{self._name} was lost during {what}: {explain_loss(error)}") from None
