"""The held-out rows of a run are scored before, during and after training; the results go to `eval.jsonl`."""

import time
from dataclasses import dataclass, field

import numpy as np

from open_instruct.config.training import TrainingConfig
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.learner.scoring import Scorer
from open_instruct.objectives.objective import Evaluation, Objective
from open_instruct.run.opened import Run


@dataclass
class Heldout:
    """The held-out rows of a run. `reference_ND` are the frozen log-probs of their documents, where there are any."""

    dataset: TokenDataset
    reference_ND: np.ndarray | None
    scorer: Scorer
    objective: Objective = field(kw_only=True)
    config: TrainingConfig = field(kw_only=True)
    run: Run = field(kw_only=True)
    _last: tuple[int, Evaluation] | None = field(default=None, init=False)

    def evaluate(self, step: int) -> Evaluation:
        """Score the model as it is after `step` steps, once. Every rank enters together."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        logps_ND = self.reference_ND
        if step > 0 or logps_ND is None:  # before the first step policy and reference are the same weights
            title = f"held-out {self.objective.rows.unit}s at step {step}"
            logps_ND = self.scorer.score(self.dataset, range(len(self.dataset)), title=title)
        assert self.objective.evaluate is not None, "or there are no held-out rows"
        evaluation = self.objective.evaluate(self.dataset, logps_ND, self.reference_ND, self.config)
        if self.run.process.rank == 0:
            self.run.directory.write_evaluation({"step": step} | dict(evaluation.row))
        self.run.console.say(evaluation.sentence.format(when=f"at step {step}"))
        self._last = step, evaluation
        return evaluation

    def metrics(self, step: int) -> dict[str, float]:
        """The entries of an evaluation in a row of metrics.jsonl: its numbers, and the seconds that it took."""
        began_s = time.perf_counter()
        row = self.evaluate(step).row
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        return numbers | {"time/evaluation": time.perf_counter() - began_s}
