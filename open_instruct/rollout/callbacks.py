"""OLMo-core's callbacks in a GRPO run, called by the driver, since learners are processes of their own."""

from typing import Any

from olmo_core.train.callbacks import Callback

from open_instruct.errors import InputError

CALLED = "log_metrics"


class Listener:
    """A tracker that hands the metrics of every step to a callback, in this process.

    Raises:
        InputError: the callback, which was given under that name, has hooks that nothing would call.
    """

    def __init__(self, name: str, callback: Callback) -> None:
        hooks = {hook for hook, usual in vars(Callback).items() if callable(usual) and not hook.startswith("_")}
        own = [hook for hook in hooks - {CALLED} if getattr(type(callback), hook) is not getattr(Callback, hook)]
        if own:
            raise InputError(
                f"callbacks: {name} has {', '.join(sorted(own))}, which nothing would call: the learners of a GRPO run "
                f"are processes of their own; here {CALLED} alone is called, after every step"
            )
        self._callback = callback

    def log(self, row: dict[str, Any], step: int) -> None:
        self._callback.log_metrics(step, {name: value for name, value in row.items() if name != "step"})

    def finish(self) -> None:
        """A listener has nothing to finish."""
