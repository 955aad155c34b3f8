"""What one rank learns with: the policy and all that stands beside it, put together in one place.

Offline runs and GRPO are wired here alike. Which models there are follows from the flags
(`CompanionModels`); what they compute follows from the objective, which is given as its loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from olmo_core.nn.transformer import Transformer
from olmo_core.train.callbacks import Callback
from torch.distributed.checkpoint.stateful import Stateful

from open_instruct.config.policy_sections import CriticSection
from open_instruct.config.run_sections import RunSection
from open_instruct.config.training import LearnerConfig
from open_instruct.objectives.objective import BoundLoss
from open_instruct.run.cadence import Cadence
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.backend import Backend
from open_instruct.training.critic import Critic
from open_instruct.training.loop import Loop
from open_instruct.training.model.routing import check_balance_scope
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Reference, build_reference
from open_instruct.training.rows.training_rows import TrainingRows
from open_instruct.training.teacher import TeacherComparison, build_comparison, build_teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionModels:
    """The checkpoints of the models that the flags put beside a policy: opened, not yet built."""

    reference: Pretrained | None = None
    """The reference of a penalty in every step; None without a penalty, or if scored once."""

    reference_moves: Mapping[str, Any] = field(default_factory=dict)
    """`update_freq` and `alpha` of a reference that follows the policy; empty: it stays."""

    teacher: Pretrained | None = None
    """Frozen; the policy is drawn to it on its own completions."""

    comparison: TeacherComparison | None = None
    """The comparison with a teacher, at every label of the rows."""

    critic: Pretrained | None = None
    critic_flags: CriticSection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What one rank learns with, whole once it exists: nothing is set on it from outside.

    It takes no steps and has no place in the data: `build_loop` makes the `Loop` that does.
    """

    run: Run
    run_flags: RunSection
    profile_steps: Sequence[int]
    """The first and the last step that are profiled; empty: none."""

    policy: Policy
    """The policy with its backend and optimizer, its reference, and its teacher."""

    critic: Critic | None
    rows: TrainingRows | None
    """The scorer, with a teacher's stored numbers; None where a fleet brings the rows."""

    cadence: Cadence
    start_model: str
    """The start model's fingerprint, which every checkpoint of the run must have."""

    def build_loop(
        self, place: Stateful, *, callbacks: Mapping[str, Callback] | None = None
    ) -> Loop:
        """The loop that takes the steps, of which `place` knows the next. Collective."""
        critic: Policy | None = None
        if self.critic is not None:
            critic = self.critic.policy
        return Loop(
            self.policy,
            place,
            run=self.run,
            flags=self.run_flags,
            profile_steps=self.profile_steps,
            start_model=self.start_model,
            cadence=self.cadence,
            critic=critic,
            callbacks=callbacks,
        )


def build_learner_state(
    pretrained: Pretrained,
    *,
    run: Run,
    config: LearnerConfig,
    loss: BoundLoss,
    cadence: Cadence,
    start_model: str,
    companions: CompanionModels,
    rows: TrainingRows | None = None,
) -> LearnerState:
    """Build the policy, then the models beside it, which take its mesh. Collective.

    Args:
        pretrained: the checkpoint that the policy starts from.
        loss: the objective's, bound to the flags of the run.
        start_model: fingerprint of the start model, see `fingerprint_start_model`.
        companions: which models stand beside the policy.
        rows: of an offline run.
    """
    backend = config.backend.build(pretrained, run=run, config=config, num_steps=cadence.num_steps)
    check_balance_scope(backend.model, config.model.router_balance)  # before others are loaded
    comparison = companions.comparison
    if comparison is not None:
        assert rows is not None, "a teacher is compared on rows"
        comparison, rows = build_comparison(
            comparison,
            rows,
            student=pretrained,
            backend=backend,
            run=run,
            config=config,
        )
    reference = build_companion_reference(companions, backend, run=run, config=config)
    teacher: Transformer | None = None
    if companions.teacher is not None:
        teacher = build_teacher(
            companions.teacher, pretrained, backend.computing_model, run=run, config=config
        )
    critic = build_critic(companions, run=run, config=config, num_steps=cadence.num_steps)
    policy = Policy(
        backend,
        loss,
        balance_scope=config.model.router_balance,
        reference=reference,
        teacher=teacher,
        comparison=comparison,
    )
    return LearnerState(
        run=run,
        run_flags=config.run,
        profile_steps=config.logging.profile_steps,
        policy=policy,
        critic=critic,
        rows=rows,
        cadence=cadence,
        start_model=start_model,
    )


def build_critic(
    companions: CompanionModels,
    *,
    run: Run,
    config: LearnerConfig,
    num_steps: int,
) -> Critic | None:
    """The critic of a run that has one."""
    if companions.critic is None:
        return None
    assert companions.critic_flags is not None
    return Critic(
        companions.critic,
        flags=companions.critic_flags,
        run=run,
        config=config,
        num_steps=num_steps,
    )


def build_companion_reference(
    companions: CompanionModels,
    backend: Backend,
    *,
    run: Run,
    config: LearnerConfig,
) -> Reference | None:
    """The reference of a penalty in every step. Collective.

    Of a policy with adapters it is the policy's own model, with its adapters off.
    """
    start = companions.reference
    if start is None:
        return None
    if config.adapters is not None:
        return Reference(model=backend.computing_model)
    build_model = partial(build_reference, start, run=run, config=config)
    if companions.reference_moves:
        return backend.moving_reference(build_model, **companions.reference_moves)
    return Reference(model=build_model())
