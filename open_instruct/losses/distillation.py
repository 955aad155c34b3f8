"""Divergences of a student's distributions from a teacher's, at every label.

With p the teacher's distribution and q the student's, and beta between 0 and 1 (Agarwal et al.
2023, arXiv:2306.13649): beta 0 is the forward KL(p || q), beta 1 the reverse KL(q || p), and
between them the generalised Jensen-Shannon divergence `beta KL(p || m) + (1 - beta) KL(q || m)` of
the mixture `m = beta p + (1 - beta) q`.

Where the teacher rules tokens out (a logit of -inf), the reverse KL of any q is infinite. It is
computed for q renormalised without these tokens, which get no gradient. The other divergences are
finite, and lower q there.

Legend: N labelled tokens, V vocabulary, k kept tokens of a teacher's distribution, O outcomes (V,
or k and the rest).
"""

from typing import Any, cast

import torch

LEAST_KEPT = 1e-6  # probability left of a student's distribution; float32 resolves no less


def divergence(
    logits_NV: torch.Tensor,
    teacher_logits_NV: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Divergence (nats) of every position, shape (N,); both logits are divided by `temperature`.

    It is exactly 0, with a gradient of exactly 0, where both logits are equal bit for bit.
    """
    teacher_NV = (teacher_logits_NV / temperature).log_softmax(dim=-1)
    return _divergence((logits_NV / temperature).log_softmax(dim=-1), teacher_NV, beta)


def keep_top_k(logits_NV: torch.Tensor, k: int, temperature: float = 1.0) -> torch.Tensor:
    """Distributions cut to their k most likely tokens: float32 (N, 2k + 1), their ids, then their
    log-probs and that of all others together. Float32 holds every whole number up to 16.7 million,
    so it holds ids exactly.
    """
    ids_Nk = logits_NV.topk(k, dim=-1).indices
    return torch.cat(
        [ids_Nk.float(), _outcome_logprobs(logits_NV, ids_Nk, temperature).float()], dim=-1
    )


def top_k_divergence(
    logits_NV: torch.Tensor,
    kept_NC: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
) -> torch.Tensor:
    """`divergence` over the teacher's tokens kept by `keep_top_k`, with all other tokens as one
    outcome.

    It is never more than the divergence over the whole vocabulary.
    """
    k = kept_NC.shape[-1] // 2
    ids_Nk = kept_NC[:, :k].long()
    teacher_NO = kept_NC[:, k:].to(logits_NV.dtype)
    return _divergence(_outcome_logprobs(logits_NV, ids_Nk, temperature), teacher_NO, beta)


def _outcome_logprobs(
    logits_NV: torch.Tensor, ids_Nk: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probs (N, k + 1) of some tokens, and of all others together; there must be others."""
    logits_NV = logits_NV / temperature
    rest_N1 = logits_NV.scatter(-1, ids_Nk, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits_NV.gather(-1, ids_Nk), rest_N1], dim=-1) - logits_NV.logsumexp(
        dim=-1, keepdim=True
    )


def _divergence(logprobs_NO: torch.Tensor, teacher_NO: torch.Tensor, beta: float) -> torch.Tensor:
    assert logprobs_NO.shape == teacher_NO.shape, (logprobs_NO.shape, teacher_NO.shape)
    return cast(torch.Tensor, _Divergence.apply(logprobs_NO, teacher_NO, beta))


class _Divergence(torch.autograd.Function):
    """The divergence with one tensor kept for the backward pass, where autograd would keep one for
    each operation.

    The gradient adds up to 0 over the outcomes, as that of normalised log-probs must.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logprobs_NO: torch.Tensor,
        teacher_NO: torch.Tensor,
        beta: float,
    ) -> torch.Tensor:
        p_NO = teacher_NO.exp()
        q_NO = logprobs_NO.exp()
        if beta == 0.0:
            value_N1 = _mean(p_NO, teacher_NO - logprobs_NO)
            slope_NO = q_NO - p_NO
        elif beta == 1.0:
            is_out_NO = teacher_NO.isneginf()
            # Exactly 1 where no token is ruled out.
            kept_N1 = (1.0 - torch.where(is_out_NO, q_NO, 0.0).sum(dim=-1, keepdim=True)).clamp(
                min=LEAST_KEPT
            )
            q_NO = q_NO.masked_fill_(is_out_NO, 0.0).div_(kept_N1)
            ratio_NO = logprobs_NO - teacher_NO - kept_N1.log()
            value_N1 = _mean(q_NO, ratio_NO)
            slope_NO = _weigh_by_prob(q_NO, ratio_NO - value_N1)
        else:
            ratio_NO = teacher_NO - logprobs_NO
            from_student_NO = -_log_mixture(ratio_NO, beta)  # log q - log m
            student_N1 = _mean(q_NO, from_student_NO)
            value_N1 = (
                beta * _mean(p_NO, -_log_mixture(-ratio_NO, 1.0 - beta)) + (1.0 - beta) * student_N1
            )
            slope_NO = (1.0 - beta) * _weigh_by_prob(q_NO, from_student_NO - student_N1)
        ctx.save_for_backward(slope_NO)
        return value_N1.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope_NO,) = ctx.saved_tensors
        return grad_N.unsqueeze(-1) * slope_NO, None, None


def _log_mixture(ratio_NO: torch.Tensor, weight: float) -> torch.Tensor:
    """log((1 - weight) + weight * e^ratio), exactly 0 where `ratio` is."""
    return torch.where(
        ratio_NO <= 0,
        torch.log1p(weight * torch.expm1(ratio_NO)),
        ratio_NO + torch.log1p((1.0 - weight) * torch.expm1(-ratio_NO)),
    )


def _weigh_by_prob(probs_NO: torch.Tensor, values_NO: torch.Tensor) -> torch.Tensor:
    """The product; an outcome of probability 0 counts 0, also where its value is infinite."""
    return torch.where(probs_NO > 0, probs_NO * values_NO, 0.0)


def _mean(probs_NO: torch.Tensor, values_NO: torch.Tensor) -> torch.Tensor:
    return _weigh_by_prob(probs_NO, values_NO).sum(dim=-1, keepdim=True)
