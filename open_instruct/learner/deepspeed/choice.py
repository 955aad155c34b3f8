"""Which backend builds a run's policy: this one where --backend says so."""

from __future__ import annotations

from collections.abc import Callable

from open_instruct.config.sections import ParallelSection
from open_instruct.learner.olmo_core.train_module import ObjectiveTrainModule


def policy_builder(parallel: ParallelSection) -> Callable[..., ObjectiveTrainModule]:
    """The `build_policy` of --backend, whose libraries are loaded now; see `learner/olmo_core/policy.py`.

    :raises InputError: they are not there.
    """
    if parallel.zero_stage is None:
        from open_instruct.learner.olmo_core.policy import build_policy
    else:
        from open_instruct.learner.deepspeed.policy import build_policy
    return build_policy
