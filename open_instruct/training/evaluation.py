"""How well a policy does on rows it was not trained on: the pairs that it ranks, the replies that it would give.

Rows go to `eval.jsonl`. N rows of the held-out data.
"""

from __future__ import annotations

import torch

from open_instruct.config.sections import PreferenceLossSection
from open_instruct.data.preference_dataset import PreferenceDataset
from open_instruct.data.sft_dataset import SFTDataset
from open_instruct.losses.preference import LOSSES, PreferenceLossInputs, preference_loss
from open_instruct.parallel.wording import counted
from open_instruct.training.preference_steps import PairLogprobs
from open_instruct.training.run import Run
from open_instruct.training.scoring import Scorer


class Heldout:
    """The held-out pairs of a run, scored before and after training."""

    def __init__(
        self, dataset: PreferenceDataset, *, reference: PairLogprobs | None, loss: PreferenceLossSection, run: Run
    ) -> None:
        self.dataset = dataset
        self.reference = reference
        self.loss = loss
        self.run = run

    def evaluate(self, scorer: Scorer, *, step: int) -> None:
        """Score the model as it is after `step` steps. Every rank enters together."""
        if step == 0 and self.reference is not None:
            policy = self.reference  # before the first step they are the same weights
        else:
            policy = PairLogprobs.of(scorer.score_all(self.dataset, title=f"held-out pairs at step {step}"))
        row = {"step": step} | rank_pairs(self.dataset, policy=policy, reference=self.reference, loss=self.loss)
        _write(row, self.run)
        self.run.console.say(
            f"held-out preference accuracy at step {step}: {row['eval/preference_accuracy']:.3f} "
            f"of {counted(len(self.dataset), 'pair')}"
        )


def evaluate_loss(dataset: SFTDataset, scorer: Scorer, *, step: int, run: Run) -> None:
    """The loss on held-out conversations as the model is after `step` steps. Every rank enters together."""
    logps_N1 = scorer.score_all(dataset, title=f"held-out conversations at step {step}")
    num_label_tokens = int(dataset.num_label_tokens.sum())
    loss = -float(logps_N1.sum(dtype="float64")) / num_label_tokens
    _write(
        {
            "step": step,
            "eval/loss": loss,
            "eval/num_label_tokens": num_label_tokens,
            "eval/num_conversations": len(dataset),
        },
        run,
    )
    run.console.say(f"held-out loss at step {step}: {loss:.4f} over {counted(len(dataset), 'conversation')}")


def _write(row: dict[str, float], run: Run) -> None:
    if run.process.rank == 0:
        run.directory.write_evaluation(row)


def rank_pairs(
    dataset: PreferenceDataset,
    *,
    policy: PairLogprobs,
    reference: PairLogprobs | None,
    loss: PreferenceLossSection,
) -> dict[str, float]:
    """Preference accuracy, and the loss and rewards on the held-out rows.

    `eval/preference_accuracy` is the share of pairs whose chosen reply has the higher log-prob (averaged
    over the reply where the loss averages too). It needs no reference, so it can be compared before
    and after training; `eval/rewards/accuracy` counts what has changed relative to the reference.
    """
    chosen_N, rejected_N = torch.from_numpy(policy.chosen_N), torch.from_numpy(policy.rejected_N)
    chosen_lengths_N = torch.as_tensor(dataset.chosen_response_lengths, dtype=torch.float32)
    rejected_lengths_N = torch.as_tensor(dataset.rejected_response_lengths, dtype=torch.float32)
    outputs = preference_loss(
        loss.loss_type,
        PreferenceLossInputs(
            policy_chosen_logps_P=chosen_N,
            policy_rejected_logps_P=rejected_N,
            chosen_lengths_P=chosen_lengths_N,
            rejected_lengths_P=rejected_lengths_N,
            reference_chosen_logps_P=None if reference is None else torch.from_numpy(reference.chosen_N),
            reference_rejected_logps_P=None if reference is None else torch.from_numpy(reference.rejected_N),
        ),
        beta=loss.beta,
        label_smoothing=loss.label_smoothing,
        gamma_beta_ratio=loss.gamma_beta_ratio,
    )
    if LOSSES[loss.loss_type].length_normalised:
        chosen_N, rejected_N = chosen_N / chosen_lengths_N, rejected_N / rejected_lengths_N
    margins_N = outputs.chosen_rewards_P - outputs.rejected_rewards_P
    return {
        "eval/preference_accuracy": float((chosen_N > rejected_N).float().mean()),
        "eval/rewards/accuracy": float((margins_N > 0).float().mean()),
        "eval/rewards/margin": float(margins_N.mean()),
        "eval/loss": float(outputs.losses_P.mean()),
        "eval/num_pairs": len(dataset),
    }
