"""Policy gradients on sampled completions: GRPO and its relatives.

Beside the log-probs a microbatch has, of each labelled token: `engine_logprobs_N` and `advantages_N`; `old_logprobs_N`,
under the policy at the start of the step, where that is not the policy of this very forward pass; and
`reference_logprobs_N` where there is a reference policy.

Legend: N labelled tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from open_instruct.config.rollout_sections import PolicyLossSection
from open_instruct.objectives.objective import BoundLoss, LossOutputs, TokenLogprobs
from open_instruct.objectives.token_metrics import token_metrics
from open_instruct.records import Batch, Metric

if TYPE_CHECKING:
    import torch


def bind(loss: PolicyLossSection, *, temperature: float, response_length: int) -> BoundLoss:
    """The loss that the flags name.

    Args:
        loss: which policy loss, and its settings.
        temperature: of sampling; all log-probs are taken under it.
        response_length: tokens that a completion may have at most; the denominator of dr_grpo.
    """

    def function(scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        return policy_gradient(scores, batch, counts, loss=loss, response_length=response_length)

    return BoundLoss(function=function, temperature=temperature, with_entropy=loss.record_entropy)


def policy_gradient(
    scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int], *, loss: PolicyLossSection, response_length: int
) -> LossOutputs:
    """The policy loss corrected for where engine and learner disagree, and the penalty for leaving the reference."""
    from open_instruct.losses.kl import kl_estimates
    from open_instruct.losses.mismatch import correct_mismatch, rho_values
    from open_instruct.losses.policy import PolicyLossInputs, global_denominator, kl_share, policy_loss

    engine_N = batch.values["engine_logprobs_N"]
    inputs = PolicyLossInputs(
        logprobs_N=scores.logprobs_N,
        # A step of one update starts where it ends its only forward pass.
        old_logprobs_N=batch.values.get("old_logprobs_N", scores.logprobs_N.detach()),
        advantages_N=batch.values["advantages_N"],
        sequence_ids_N=scores.sequence_ids_N,
        num_sequences=batch.packed.num_sequences,
    )
    outputs = policy_loss(loss.loss_fn, inputs, clip_lower=loss.clip_lower, clip_higher=loss.clip_higher)
    correction = correct_mismatch(
        loss.rho_correction,
        learner_logprobs_N=inputs.old_logprobs_N,
        engine_logprobs_N=engine_N,
        sequence_ids_N=inputs.sequence_ids_N,
        num_sequences=inputs.num_sequences,
        cap=loss.rho_cap,
    )
    denominator = global_denominator(
        loss.loss_fn,
        num_tokens=counts["labels"],
        num_completions=counts["rows"],
        response_length=response_length,
        constant=None if loss.loss_denominator == "token" else int(loss.loss_denominator),
    )
    policy_part = (correction.weights_N * outputs.losses_N).sum() / max(denominator, 1.0)
    total = policy_part
    values_N = {"clip_fraction": outputs.is_clipped_N}
    if scores.entropy_N is not None:
        values_N["entropy"] = scores.entropy_N
    if "reference_logprobs_N" in batch.values:
        kl_N = kl_estimates(loss.kl_estimator, scores.logprobs_N, batch.values["reference_logprobs_N"])
        values_N["kl"] = kl_N.detach()
        # The estimate, too, is of an expectation under the policy, so the engine's samples weigh as above.
        kl_N = correction.weights_N * kl_share(loss.loss_fn, kl_N, inputs)
        total = total + loss.beta * kl_N.sum() / max(denominator, 1.0)

    metrics = {
        "loss": Metric(value=total.detach(), reduction="sum"),
        "policy_loss": Metric(value=policy_part.detach(), reduction="sum"),
    }
    if counts["rows"] > 0:
        differences_N = (inputs.old_logprobs_N - engine_N).abs()
        metrics |= token_metrics(values_N | {"logprob_diff/mean": differences_N} | rho_values(correction))
        metrics |= {
            "logprob_diff/max": _largest(differences_N),
            "rho/max": _largest(correction.rho_N),
        }
    return LossOutputs(loss=total, metrics=metrics)


def _largest(values_N: torch.Tensor) -> Metric:
    """The largest of numbers that are never negative; an empty microbatch has 0."""
    return Metric(value=values_N.max() if values_N.numel() else 0.0, reduction="max")
