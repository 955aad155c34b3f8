"""What a run's --backend builds: this one where that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from open_instruct.config.sections import ParallelSection
from open_instruct.learner.backend import Backend


class Chosen(NamedTuple):
    """`build` as in `learner/olmo_core/build.py`, `moving_reference` as in `learner/reference_policy.py`."""

    build: Callable[..., Backend]
    moving_reference: Callable[..., Any]


def backend_of(parallel: ParallelSection) -> Chosen:
    """That of --backend, whose libraries are loaded now.

    :raises InputError: they are not there.
    """
    if parallel.zero_stage is None:
        from open_instruct.learner.olmo_core import build as on_fsdp2
        from open_instruct.learner.reference_policy import moving_reference

        return Chosen(on_fsdp2.build_backend, moving_reference)
    from open_instruct.learner.deepspeed import build as on_zero

    return Chosen(on_zero.build_backend, on_zero.moving_reference)
