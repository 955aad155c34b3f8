"""A weight receiver for tests: its channel is the path of a checkpoint, read anew at each
update.
"""

from typing import Any


class FolderReceiver:
    """What vLLM adds to its worker class; `self` is the worker."""

    def open_channel(self: Any, info: dict[str, Any]) -> None:
        self.folders = list(info["folders"])

    def start_update(self: Any) -> None:
        for layer in self.model_runner.get_model().modules():
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                # Made again of the new weights, as our own receiver has it.
                method.moe_kernel = None

    def receive_weights(self: Any) -> None:
        self.reload_weights(weights_path=self.folders.pop(0))

    def finish_update(self: Any) -> None:
        pass
