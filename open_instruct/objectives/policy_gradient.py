"""Policy gradients on sampled completions, GRPO and its relatives: the sum of three losses over
tokens.

    rl  the policy loss of tokens that the policy sampled, weighed by --rl_coef
    kl  the penalty for the distance to a frozen model: --beta times that of the reference policy,
        --teacher_kl_coef times that of a teacher (on-policy distillation, arXiv 2306.13649)
    ce  the cross-entropy, at temperature 1, of tokens that the policy did not sample, such as
        written conversations or the output of a tool; weighed by --ce_coef

Each has its own weights of tokens and its own counts, so adding tokens to one does not change
another.

`core.batch_values.RLValues` says what a microbatch has beside the log-probs, and `Stream` there
what the tokens of a loss are.

Legend: N labelled tokens of a microbatch, M those of one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.core.batch_values import RLValues, Stream
from open_instruct.core.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.core.user_code import load_own_function
from open_instruct.data.prompts import PromptBuilder
from open_instruct.losses.covariance import TokenColumns, token_keys
from open_instruct.losses.mismatch import (
    MISMATCH_FLAGS,
    Correction,
    correct_mismatch,
    kl_estimates,
    rho_values,
)
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.losses.policy_loss import PolicyLoss, PolicyLossInputs
from open_instruct.losses.registry import bind_flags
from open_instruct.objectives.objective import (
    BoundLoss,
    Gather,
    LossOutputs,
    Objective,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import torch


def bind(loss: PolicyLossSection, *, temperature: float, response_length: int) -> BoundLoss:
    """The loss that the flags name.

    Args:
        loss: which policy loss, and its settings.
        temperature: of sampling; the log-probs of sampled tokens are taken under it.
        response_length: tokens that a completion may have at most; the denominator of dr_grpo.

    Raises:
        InputError: a `--loss_fn` of the user's own cannot be loaded.
    """
    function = load_own_function(loss.loss_fn, flag="--loss_fn", built_in=POLICY_LOSSES)
    if function is None:
        policy_loss = POLICY_LOSSES[loss.loss_fn]
    else:
        policy_loss = PolicyLoss(function=lambda inputs: function(inputs, loss))
    return PolicyGradientLoss(
        section=loss,
        policy_loss=policy_loss,
        response_length=response_length,
        temperature=temperature,
        with_entropy=measures_entropy(loss),
        scores_before_step=chooses_tokens(loss),
    )


def chooses_tokens(loss: PolicyLossSection) -> bool:
    """Whether the loss selects tokens over the whole batch, which needs an extra forward pass in
    every update.
    """
    return loss.top_entropy_quantile < 1 or _known_marks(loss) is not None


def _known_marks(loss: PolicyLossSection) -> Callable[..., torch.Tensor] | None:
    """What marks tokens under a loss of ours, with the flags bound."""
    policy_loss = POLICY_LOSSES.get(loss.loss_fn)
    if policy_loss is None or policy_loss.marks is None:
        return None
    return bind_flags(policy_loss.marks, policy_loss.marks_flags, loss)


def measures_entropy(loss: PolicyLossSection) -> bool:
    return loss.record_entropy or loss.top_entropy_quantile < 1


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss(BoundLoss):
    """The sum of the three losses, each over its own tokens.

    Args:
        section: the flags.
        policy_loss: the formula that `--loss_fn` names.
        response_length: tokens that a completion may have at most.
    """

    values_class = RLValues

    section: PolicyLossSection
    policy_loss: PolicyLoss
    response_length: int

    def compute(
        self, scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]
    ) -> LossOutputs:
        loss = self.section
        values = RLValues.read(batch.values)
        inputs, correction = _sampled_tokens(values.rl, scores, batch, loss)
        outputs = self.policy_loss.outputs(replace(inputs, marked_N=values.is_marked_M), loss)
        losses_M = values.rl.weigh(correction.weights_N * outputs.losses_N)
        if values.is_learned_M is not None:
            losses_M = losses_M * values.is_learned_M
        policy_part = losses_M.sum() / self._find_denominator("rl", counts)
        total = loss.rl_coef * policy_part
        token_metrics = {"clip_fraction": outputs.is_clipped_N}
        if scores.entropy_N is not None:
            token_metrics["entropy"] = values.rl.take(scores.entropy_N)
        if values.reference_logprobs_N is not None:
            kl_sum, kl_M = _reference_distance(scores, batch, loss, self.policy_loss)
            token_metrics["kl"] = kl_M
            total = total + loss.beta * kl_sum / self._find_denominator("kl", counts)
        if values.teacher_logprobs_N is not None:
            kl_sum, kl_M = _teacher_distance(scores, batch, loss, self.policy_loss)
            token_metrics["teacher_kl"] = kl_M
            total = total + loss.teacher_kl_coef * kl_sum / self._find_denominator("kl", counts)
        metrics: dict[str, Metric] = {}
        if counts["ce_labels"] > 0:
            ce_part = _cross_entropy_sum(scores, batch) / counts["ce_labels"]
            total = total + loss.ce_coef * ce_part
            metrics["ce"] = Metric(value=ce_part.detach(), reduction="sum")
        metrics["loss"] = Metric(value=total.detach(), reduction="sum")
        metrics["policy_loss"] = Metric(value=policy_part.detach(), reduction="sum")
        if counts["rl_rows"] > 0:
            engine_logprobs_M = values.rl.take(values.engine_logprobs_N)
            differences_M = (inputs.old_logprobs_N - engine_logprobs_M).abs()
            token_metrics["logprob_diff/mean"] = differences_M
            metrics |= mean_metrics(token_metrics | rho_values(correction))
            metrics["logprob_diff/max"] = _largest(differences_M)
            metrics["rho/max"] = _largest(correction.rho_N)
        return LossOutputs(loss=total, metrics=metrics)

    def _find_denominator(self, stream: str, counts: Mapping[str, int]) -> float:
        """What the sum over a stream's tokens is divided by, at least 1."""
        constant = None
        if self.section.loss_denominator != "token":
            constant = int(self.section.loss_denominator)
        denominator = self.policy_loss.denominator(
            num_tokens=counts[f"{stream}_labels"],
            num_completions=counts[f"{stream}_rows"],
            response_length=self.response_length,
            constant=constant,
        )
        return max(denominator, 1.0)

    def prepare(
        self, step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather
    ) -> StepBatch:
        """Choose tokens over the whole update, where the flags ask for it."""
        if not self.scores_before_step:
            return step
        return choose_tokens(step, scores, gather, loss=self.section)

    def find_temperatures(self, batch: Batch) -> float | torch.Tensor:
        """1 for the tokens of `ce`, which nobody sampled."""
        ce = RLValues.read(batch.values).ce
        if ce is None or self.temperature == 1.0:
            return self.temperature
        import torch

        num_labels = len(batch.packed.sequence_ids_N)
        temperatures_N = torch.full((num_labels,), self.temperature)
        ones_M = torch.ones_like(ce.take(temperatures_N))
        return temperatures_N.masked_fill(ce.scatter(ones_M, num_labels) > 0, 1.0)


def _sampled_tokens(
    stream: Stream,
    scores: TokenLogprobs,
    batch: Batch,
    loss: PolicyLossSection,
) -> tuple[PolicyLossInputs, Correction]:
    """The inputs of the policy loss for a stream's tokens, and the correction for the engine that
    sampled them.
    """
    values = RLValues.read(batch.values)
    inputs = PolicyLossInputs(
        logprobs_N=stream.take(scores.logprobs_N),
        old_logprobs_N=stream.take(_old_logprobs(values, scores)),
        advantages_N=stream.take(values.advantages_N),
        sequence_ids_N=stream.take(scores.sequence_ids_N),
        num_sequences=batch.packed.num_sequences,
    )
    log_rho_N = inputs.old_logprobs_N - stream.take(values.engine_logprobs_N)
    correct = bind_flags(correct_mismatch, MISMATCH_FLAGS, loss)
    correction = correct(log_rho_N, inputs.sequence_ids_N, inputs.num_sequences)
    return inputs, correction


def _old_logprobs(values: RLValues, scores: TokenLogprobs) -> torch.Tensor:
    """The log-probs of the policy at the start of the step, without gradient.

    In a step of one update it is the policy of this forward pass.
    """
    if values.old_logprobs_N is None:
        return scores.logprobs_N.detach()
    return values.old_logprobs_N


def _reference_distance(
    scores: TokenLogprobs,
    batch: Batch,
    loss: PolicyLossSection,
    policy_loss: PolicyLoss,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the estimated divergence from the reference, and the estimate at every
    token.
    """
    values = RLValues.read(batch.values)
    assert values.reference_logprobs_N is not None
    inputs, correction = _sampled_tokens(values.kl, scores, batch, loss)
    frozen_M = values.kl.take(values.reference_logprobs_N)
    estimates_M = kl_estimates(loss.kl_estimator, inputs.logprobs_N, frozen_M)
    kl_M = estimates_M
    if loss.kl_importance_weighted:
        kl_M = policy_loss.importance_ratio(inputs) * kl_M
    # The KL is an expectation under the policy too, so the engine's samples get the same importance
    # weights.
    shares_M = correction.weights_N * policy_loss.shares(kl_M, inputs)
    return values.kl.weigh(shares_M).sum(), estimates_M.detach()


def _teacher_distance(
    scores: TokenLogprobs,
    batch: Batch,
    loss: PolicyLossSection,
    policy_loss: PolicyLoss,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of half the squared log-ratio to the teacher, and the log-ratio at every
    token.

    The sum has the gradient of the divergence, and the log-ratio its value.
    """
    values = RLValues.read(batch.values)
    assert values.teacher_logprobs_N is not None
    inputs, correction = _sampled_tokens(values.kl, scores, batch, loss)
    frozen_M = values.kl.take(values.teacher_logprobs_N)
    kl_M = kl_estimates("1", inputs.logprobs_N, frozen_M)
    log_ratios_M = kl_estimates("0", inputs.logprobs_N, frozen_M).detach()
    shares_M = correction.weights_N * policy_loss.shares(kl_M, inputs)
    return values.kl.weigh(shares_M).sum(), log_ratios_M


def _cross_entropy_sum(scores: TokenLogprobs, batch: Batch) -> torch.Tensor:
    """The weighted sum of -log p over the tokens of `ce`."""
    ce = RLValues.read(batch.values).ce
    if ce is None:
        return -scores.logprobs_N[:0].sum()
    return -ce.weigh(ce.take(scores.logprobs_N)).sum()


def choose_tokens(
    step: StepBatch,
    scores: Sequence[TokenLogprobs],
    gather: Gather,
    *,
    loss: PolicyLossSection,
) -> StepBatch:
    """The step with what is chosen among all tokens of `rl` in the update, so however the batch is
    cut.

    `RLValues.is_learned_M` are the tokens of the highest entropy, where --top_entropy_quantile asks
    for some of them; `is_marked_M` those that the policy loss treats apart (`PolicyLoss.marks`).
    """
    values = [RLValues.read(batch.values) for batch in step.microbatches]
    if loss.top_entropy_quantile < 1:
        selected_tokens = _highest_entropy(step, scores, gather, share=loss.top_entropy_quantile)
        values = [
            replace(each, is_learned_M=is_learned_M)
            for each, is_learned_M in zip(values, selected_tokens, strict=True)
        ]
    marks = _known_marks(loss)
    if marks is not None:
        marked_tokens = _marked_tokens(step, scores, gather, marks=marks)
        values = [
            replace(each, is_marked_M=is_marked_M)
            for each, is_marked_M in zip(values, marked_tokens, strict=True)
        ]
    microbatches = [
        replace(batch, values=each) for batch, each in zip(step.microbatches, values, strict=True)
    ]
    return replace(step, microbatches=tuple(microbatches))


def _highest_entropy(
    step: StepBatch,
    scores: Sequence[TokenLogprobs],
    gather: Gather,
    *,
    share: float,
) -> list[torch.Tensor]:
    """Marks of each microbatch: 1 at the tokens among the share of the highest entropy.

    At least one token is marked, and all ties are.
    """
    import torch

    from open_instruct.batching.documents import move_to_device

    entropies: list[torch.Tensor] = []
    for batch, token_scores in zip(step.microbatches, scores, strict=True):
        assert token_scores.entropy_N is not None, "see `measures_entropy`"
        values = RLValues.read(move_to_device(batch.values, token_scores.entropy_N.device))
        entropies.append(values.rl.take(token_scores.entropy_N).double())
    everywhere_U = gather(torch.cat(entropies))
    num_chosen = max(1, round(share * everywhere_U.numel()))
    least = everywhere_U.topk(num_chosen).values[-1] if everywhere_U.numel() else 0.0
    return [(entropy_N >= least).float() for entropy_N in entropies]


def _marked_tokens(
    step: StepBatch,
    scores: Sequence[TokenLogprobs],
    gather: Gather,
    *,
    marks: Callable[..., torch.Tensor],
) -> list[torch.Tensor]:
    """Marks of each microbatch: 1 at the tokens that the policy loss treats apart."""
    import torch

    from open_instruct.batching.documents import move_to_device

    columns: list[TokenColumns] = []
    for batch, token_scores in zip(step.microbatches, scores, strict=True):
        values = RLValues.read(move_to_device(batch.values, token_scores.logprobs_N.device))
        rl = values.rl
        old_logprobs_N = _old_logprobs(values, token_scores)
        keys_M = token_keys(
            rl.take(values.engine_logprobs_N),
            rl.take(token_scores.sequence_ids_N),
            batch.packed.num_sequences,
        )
        columns.append(
            TokenColumns(
                logprobs=rl.take(token_scores.logprobs_N).detach().double(),
                old_logprobs=rl.take(old_logprobs_N).detach().double(),
                advantages=rl.take(values.advantages_N).double(),
                keys=keys_M,
            )
        )
    update = TokenColumns(*(gather(torch.cat(parts)) for parts in zip(*columns, strict=True)))
    return [marks(here, update).float() for here in columns]


def _largest(values_N: torch.Tensor) -> Metric:
    """The largest of numbers that are never negative; an empty microbatch has 0."""
    return Metric(value=values_N.max() if values_N.numel() else 0.0, reduction="max")


class GRPOObjective(Objective[GRPOConfig]):
    """Policy gradients on completions of the run's own engines.

    So its entry is grpo_olmo_core_actor.py and not train.py.
    """

    name = "grpo"
    config_class = GRPOConfig
    rows = PromptBuilder

    def validate(self, config: GRPOConfig) -> list[str]:
        return validate_grpo(config)

    def bind(self, config: GRPOConfig) -> BoundLoss:
        return bind(
            config.loss,
            temperature=config.rollout.temperature,
            response_length=config.data.response_length,
        )


GRPO = GRPOObjective()
