"""Counts where the host waits for the GPU, by file and line."""

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch
from harness import REPOSITORY

WARNED = "synchronizing CUDA operation"
"""What PyTorch's warning says, under `torch.cuda.set_sync_debug_mode("warn")`."""
OURS = (str(REPOSITORY / "open_instruct"), "olmo_core")
# What waits by its name is not warned of.
ASKED_TO_WAIT = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)


@contextlib.contextmanager
def counted_host_waits(*, on_cuda: bool) -> Iterator[Counter[str]]:
    """The places at which the block waits, and how often.

    What NCCL and gloo wait for is not seen.
    """
    waits: Counter[str] = Counter()

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if WARNED in str(message):
            waits[place(f"{filename}:{lineno}")] += 1
        else:
            others(message, category, filename, lineno, file, line)

    with contextlib.ExitStack() as held:
        others = warnings.showwarning
        held.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = showwarning
        for owner, name in ASKED_TO_WAIT:
            stock = getattr(owner, name)

            def waiting(*args: Any, stock: Any = stock, **kwargs: Any) -> Any:
                waits[place("synchronize")] += 1
                return stock(*args, **kwargs)

            held.enter_context(mock.patch.object(owner, name, waiting))
        if on_cuda:
            torch.cuda.set_sync_debug_mode("warn")
            held.callback(torch.cuda.set_sync_debug_mode, "default")
        yield waits


def place(otherwise: str) -> str:
    """The innermost line of this package or of OLMo-core that is being run, and what is written
    there.
    """
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(OURS[0]) or f"/{OURS[1]}/" in frame.filename:
            path = Path(frame.filename)
            short = (
                path.relative_to(REPOSITORY)
                if path.is_relative_to(REPOSITORY)
                else Path(*path.parts[-3:])
            )
            return f"{short}:{frame.lineno} in {frame.name}: {frame.line}"
    return otherwise
