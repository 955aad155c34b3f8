"""What a run's --backend builds: this one where that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from open_instruct.config.sections import ParallelSection
from open_instruct.learner.olmo_core.train_module import ObjectiveTrainModule


class Backend(NamedTuple):
    """`build_policy` as in `learner/olmo_core/policy.py`, `moving_reference` as in `learner/reference_policy.py`."""

    build_policy: Callable[..., ObjectiveTrainModule]
    moving_reference: Callable[..., Any]


def backend_of(parallel: ParallelSection) -> Backend:
    """That of --backend, whose libraries are loaded now.

    :raises InputError: they are not there.
    """
    if parallel.zero_stage is None:
        from open_instruct.learner.olmo_core.policy import build_policy
        from open_instruct.learner.reference_policy import moving_reference
    else:
        from open_instruct.learner.deepspeed.policy import build_policy, moving_reference
    return Backend(build_policy, moving_reference)
