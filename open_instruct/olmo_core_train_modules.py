"""One optimisation step each: `SFTTrainModule`, `DPOTrainModule`, `GRPOTrainModule`.

SFT: N labelled tokens of a microbatch. DPO: P preference pairs, S = 2P documents of a microbatch (chosen first).
GRPO: S completions, N labelled tokens of them in the order of the row(s); B rows, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from olmo_core.utils import move_to_device
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from open_instruct.config.rollout_sections import PolicyLossSection
from open_instruct.config.sections import PreferenceLossSection
from open_instruct.errors import RunError
from open_instruct.losses.kl import kl_estimates
from open_instruct.losses.mismatch import correct_mismatch, rho_values
from open_instruct.losses.policy import PolicyLossInputs, global_denominator, kl_share, policy_loss
from open_instruct.losses.preference import PreferenceLossInputs, PreferenceLossOutputs, preference_loss
from open_instruct.models.shards import reshard
from open_instruct.packing.rollouts import RolloutMiniBatch
from open_instruct.records import Metric, PackedBatch, PreferenceBatch, RolloutBatch, SFTBatch
from open_instruct.training.forward import sequence_logprobs, token_logprobs
from open_instruct.training.preference_steps import PreferenceStep
from open_instruct.training.reference_policy import polyak_update
from open_instruct.training.sft_steps import SFTStep
from open_instruct.training.train_module import SegmentTrainModule

# What an updated reference policy is called in a checkpoint.
REFERENCE = "reference"


class SFTTrainModule(SegmentTrainModule):
    """Supervised tuning: the cross-entropy of OLMo-core's language-model head, a mean over the tokens of the replies.

    Every argument is `TransformerTrainModule`'s.
    """

    def microbatch_loss(self, microbatch: SFTBatch, step: SFTStep) -> tuple[torch.Tensor, dict[str, Metric]]:
        logprobs_N = token_logprobs(self.computing_model, microbatch.packed, device=self.device).logprobs_N
        return -logprobs_N.sum() / step.num_label_tokens_global, token_metrics({"loss": -logprobs_N.detach()})


class DPOTrainModule(SegmentTrainModule):
    """Preference tuning on OLMo-core's train module; every other argument is `TransformerTrainModule`'s.

    :param loss: which preference loss, and its settings.
    """

    def __init__(self, *, loss: PreferenceLossSection, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        self.loss = loss

    def microbatch_loss(
        self, microbatch: PreferenceBatch, step: PreferenceStep
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        outputs = self.preference_outputs(microbatch)
        loss = outputs.losses_P.sum() / step.num_pairs_global
        return loss, preference_metrics(outputs)

    def preference_outputs(self, microbatch: PreferenceBatch) -> PreferenceLossOutputs:
        """Losses and rewards of each pair of `microbatch` under the current policy."""
        logprobs = sequence_logprobs(self.computing_model, microbatch.packed, device=self.device)
        chosen_logps_P, rejected_logps_P = logprobs.sums_S.view(2, -1)
        chosen_lengths_P, rejected_lengths_P = logprobs.lengths_S.view(2, -1)
        return preference_loss(
            self.loss.loss_type,
            PreferenceLossInputs(
                policy_chosen_logps_P=chosen_logps_P,
                policy_rejected_logps_P=rejected_logps_P,
                chosen_lengths_P=chosen_lengths_P,
                rejected_lengths_P=rejected_lengths_P,
                reference_chosen_logps_P=move_to_device(microbatch.reference_chosen_logps_P, self.device),
                reference_rejected_logps_P=move_to_device(microbatch.reference_rejected_logps_P, self.device),
            ),
            beta=self.loss.beta,
            label_smoothing=self.loss.label_smoothing,
            gamma_beta_ratio=self.loss.gamma_beta_ratio,
        )

    def _check(self, loss: float) -> None:
        super()._check(loss)
        expected = loss_at_reference(self.loss)
        if self.trainer.global_step != 1 or expected is None:
            return
        # Policy and reference are the same weights before the first update: the cheapest proof that
        # packing, labels and the reference cache agree.
        computes_in = self.dp_config.param_dtype if self.dp_config else next(self.computing_model.parameters()).dtype
        in_float32 = computes_in in ("float32", torch.float32)
        tolerance = (1e-3 if in_float32 else 5e-2) * max(1.0, expected)
        if abs(loss - expected) > tolerance:
            raise RunError(
                f"the first loss is {loss:.6f}, but a policy equal to its reference has {expected:.6f}: the "
                "reference log-probs do not belong to these weights and rows. Remove the folder "
                "'reference_logprobs' in --cache_dir and start again"
            )


def loss_at_reference(loss: PreferenceLossSection) -> float | None:
    """The loss of a policy that equals its reference; None where it depends on the policy."""
    return {
        "dpo": math.log(2.0),
        "dpo_norm": math.log(2.0),
        "hinge": 1.0,
        "ipo": 1.0 / (4.0 * loss.beta**2),
    }.get(loss.loss_type)


def preference_metrics(outputs: PreferenceLossOutputs) -> dict[str, Metric]:
    """Means over the pairs of a microbatch, weighted by their number."""
    num_pairs = float(outputs.losses_P.numel())
    margins_P = outputs.chosen_rewards_P - outputs.rejected_rewards_P
    values_P = {
        "loss": outputs.losses_P.detach(),
        "rewards/chosen": outputs.chosen_rewards_P,
        "rewards/rejected": outputs.rejected_rewards_P,
        "rewards/margin": margins_P,
        "rewards/accuracy": (margins_P > 0).float(),
        "logps/chosen": outputs.chosen_logps_P,
        "logps/rejected": outputs.rejected_logps_P,
    }
    return {
        name: Metric(value=value_P.sum() / max(num_pairs, 1.0), weight=num_pairs) for name, value_P in values_P.items()
    }


class GRPOTrainModule(SegmentTrainModule):
    """Policy gradients on sampled completions; every other argument is `TransformerTrainModule`'s.

    A step is: `fill_logprobs` for all its mini-batches, then for each of them, and again for each epoch, `zero_grads`,
    `train_batch`, `optim_step`; at last `end_step`. The KL penalty needs `reference`, a model that is sharded as the
    policy is; where `loss.beta` is above 0, give it before the first step and before a checkpoint is loaded.

    A reference that is never updated is the start model, and is built from there again after a restart. One that
    `loss.ref_policy_update_freq` moves is part of the checkpoints, beside the policy and the optimizer.

    :param loss: which policy loss, and its settings.
    :param temperature: of sampling; all log-probs are taken under it.
    :param response_length: tokens that a completion may have at most; the denominator of dr_grpo.
    """

    def __init__(self, *, loss: PolicyLossSection, temperature: float, response_length: int, **olmo_core: Any) -> None:
        super().__init__(**olmo_core)
        self.loss = loss
        self.temperature = temperature
        self.response_length = response_length
        self.reference: Transformer | None = None
        self._has_nothing_to_learn = False

    @torch.no_grad()
    def fill_logprobs(self, minibatches: Sequence[RolloutMiniBatch]) -> tuple[RolloutMiniBatch, ...]:
        """The mini-batches of a step with the log-probs that are fixed during it; call it before the first update.

        The reference policy's, if there is one, and those of the policy as it is now. The latter are left out where the
        step is a single update: there they are those of the update's own forward pass, so a pass is saved, and the
        ratio is exactly 1.
        """
        self._check_reference()
        needs_old = len(minibatches) * self.loss.num_epochs > 1
        if not needs_old and self.reference is None:
            return tuple(minibatches)
        self._set_model_mode("eval")
        filled = tuple(
            replace(
                minibatch,
                microbatches=tuple(
                    replace(
                        microbatch,
                        old_logprobs_BT=self._logprobs_BT(self.computing_model, microbatch) if needs_old else None,
                        reference_logprobs_BT=None
                        if self.reference is None
                        else self._logprobs_BT(self.reference, microbatch),
                    )
                    for microbatch in minibatch.microbatches
                ),
            )
            for minibatch in minibatches
        )
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        if self.reference is not None:
            reshard(self.reference)
        return filled

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        self._has_nothing_to_learn = batch["step"].num_completions_global == 0
        super().train_batch(batch, dry_run)

    def optim_step(self) -> None:
        """Update the weights; not where there was nothing to learn from, or momentum alone would move them."""
        if self._has_nothing_to_learn:
            self.trainer.record_metric("total grad norm", 0.0, namespace="optim")
        else:
            super().optim_step()

    def end_step(self) -> None:
        reference, every = self._moving_reference, self.loss.ref_policy_update_freq
        if reference is not None and every is not None and self.trainer.global_step % every == 0:
            polyak_update(reference, self.model, alpha=self.loss.alpha)

    def state_dict_to_save(self, *, optim: bool | None = None) -> dict[str, Any]:
        state = super().state_dict_to_save(optim=optim)
        reference = self._moving_reference
        if reference is not None:
            state[REFERENCE] = get_model_state_dict(reference, options=self.state_dict_save_opts)
        return state

    def state_dict_to_load(self, metadata: Metadata, *, optim: bool | None = None) -> dict[str, Any]:
        state = super().state_dict_to_load(metadata, optim=optim)
        reference = self._moving_reference
        if reference is not None and any(name.startswith(f"{REFERENCE}.") for name in metadata.state_dict_metadata):
            state[REFERENCE] = get_model_state_dict(reference, options=self.state_dict_load_opts)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        reference = self._moving_reference
        if reference is not None and REFERENCE in state_dict:
            set_model_state_dict(reference, state_dict[REFERENCE], options=self.state_dict_load_opts)

    @property
    def _moving_reference(self) -> Transformer | None:
        """The reference, if it is one that is updated."""
        self._check_reference()
        return None if self.loss.ref_policy_update_freq is None else self.reference

    def _check_reference(self) -> None:
        assert (self.reference is not None) == (self.loss.beta > 0), "a reference policy goes with beta, and only so"

    def microbatch_loss(
        self, microbatch: RolloutBatch, step: RolloutMiniBatch
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        loss = self.loss
        tokens = token_logprobs(
            self.computing_model,
            microbatch.packed,
            device=self.device,
            temperature=self.temperature,
            with_entropy=loss.record_entropy,
        )
        engine_N = self._at_labels(microbatch, microbatch.engine_logprobs_BT)
        inputs = PolicyLossInputs(
            logprobs_N=tokens.logprobs_N,
            # A step of one update starts where it ends its only forward pass.
            old_logprobs_N=tokens.logprobs_N.detach()
            if microbatch.old_logprobs_BT is None
            else self._at_labels(microbatch, microbatch.old_logprobs_BT),
            advantages_N=self._at_labels(microbatch, microbatch.advantages_BT),
            sequence_ids_N=tokens.sequence_ids_N,
            num_sequences=microbatch.packed.num_sequences,
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
            num_tokens=step.num_label_tokens_global,
            num_completions=step.num_completions_global,
            response_length=self.response_length,
            constant=None if loss.loss_denominator == "token" else int(loss.loss_denominator),
        )
        policy_part = (correction.weights_N * outputs.losses_N).sum() / max(denominator, 1.0)
        total = policy_part
        values_N = {"clip_fraction": outputs.is_clipped_N}
        if tokens.entropy_N is not None:
            values_N["entropy"] = tokens.entropy_N
        if microbatch.reference_logprobs_BT is not None:
            reference_N = self._at_labels(microbatch, microbatch.reference_logprobs_BT)
            kl_N = kl_estimates(loss.kl_estimator, tokens.logprobs_N, reference_N)
            values_N["kl"] = kl_N.detach()
            # The estimate, too, is of an expectation under the policy, so the engine's samples weigh as above.
            kl_N = correction.weights_N * kl_share(loss.loss_fn, kl_N, inputs)
            total = total + loss.beta * kl_N.sum() / max(denominator, 1.0)

        metrics = {
            "loss": Metric(value=total.detach(), reduction="sum"),
            "policy_loss": Metric(value=policy_part.detach(), reduction="sum"),
        }
        if step.num_completions_global > 0:
            differences_N = (inputs.old_logprobs_N - engine_N).abs()
            metrics |= token_metrics(values_N | {"logprob_diff/mean": differences_N} | rho_values(correction))
            metrics |= {
                "logprob_diff/max": _largest(differences_N),
                "rho/max": _largest(correction.rho_N),
            }
        return total, metrics

    def _logprobs_BT(self, model: Transformer, microbatch: RolloutBatch) -> torch.Tensor:
        """Log-probs of the labels under `model`, laid out as the labels are; 0 where there is none."""
        tokens = token_logprobs(model, microbatch.packed, device=self.device, temperature=self.temperature)
        positions_N = _label_positions(microbatch.packed).to(self.device)
        logprobs = tokens.logprobs_N.new_zeros(microbatch.packed.labels_BT.numel())
        return logprobs.index_copy(0, positions_N, tokens.logprobs_N).view_as(microbatch.packed.labels_BT)

    def _at_labels(self, microbatch: RolloutBatch, values_BT: torch.Tensor) -> torch.Tensor:
        """The values of the labelled tokens, in the order of `token_logprobs`."""
        positions_N = _label_positions(microbatch.packed).to(values_BT.device)
        return values_BT.flatten().index_select(0, positions_N).to(self.device)


def _label_positions(packed: PackedBatch) -> torch.Tensor:
    """Where the labels of a batch stand, counted row by row; shape (N,)."""
    return (packed.sequence_ids_BT.flatten() >= 0).nonzero().squeeze(1)


def token_metrics(values_N: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Means over the tokens of a microbatch, weighted by their number."""
    return {
        name: Metric(value=value_N.sum() / max(value_N.numel(), 1), weight=float(value_N.numel()))
        for name, value_N in values_N.items()
    }


def _largest(values_N: torch.Tensor) -> Metric:
    """The largest of numbers that are never negative; an empty microbatch has 0."""
    return Metric(value=values_N.max() if values_N.numel() else 0.0, reduction="max")
