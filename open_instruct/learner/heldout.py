"""How well a policy does on rows it was not trained on, before training and after; rows go to `eval.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from open_instruct.config.training import TrainingConfig
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.learner.scoring import Scorer
from open_instruct.objectives.objective import Objective
from open_instruct.run.opened import Run


class Heldout:
    """The held-out rows of a run. `reference_ND` are the frozen log-probs of their documents, where there are any."""

    def __init__(
        self,
        dataset: TokenDataset,
        objective: Objective,
        *,
        reference_ND: np.ndarray | None,
        config: TrainingConfig,
        run: Run,
    ) -> None:
        self.dataset = dataset
        self.objective = objective
        self.reference_ND = reference_ND
        self.config = config
        self.run = run

    def evaluate(self, scorer: Scorer, *, step: int) -> Mapping[str, Any]:
        """Score the model as it is after `step` steps; what config.json keeps of it. Every rank enters together."""
        if self.objective.evaluate is None:
            return {}
        logps_ND = self.reference_ND
        if step > 0 or logps_ND is None:  # before the first step policy and reference are the same weights
            logps_ND = scorer.score_all(self.dataset, title=f"held-out {self.objective.rows.unit}s at step {step}")
        evaluation = self.objective.evaluate(self.dataset, logps_ND, self.reference_ND, self.config)
        if self.run.process.rank == 0:
            self.run.directory.write_evaluation({"step": step} | dict(evaluation.row))
        self.run.console.say(evaluation.sentence.format(when=f"at step {step}"))
        return evaluation.exported
