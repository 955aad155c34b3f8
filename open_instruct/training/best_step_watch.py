"""`--keep_best` while a run goes on: which step is the best, and is exported in the end.

That follows from the rows that a run writes, and from the checkpoints that it has: it is found
again when a run resumes, however it ended, and no checkpoint has to hold it.
"""

from collections.abc import Mapping
from typing import Any

from open_instruct.checkpoints.step_folder import find_checkpoints, step_of
from open_instruct.core.metrics import HELD_OUT_PREFIX, metric_entry
from open_instruct.core.records import BestStep
from open_instruct.core.text import spell_count
from open_instruct.parallel.process import run_on_main_process
from open_instruct.run.cadence import Cadence
from open_instruct.run.run_directory import RunDirectory, is_number, read_rows


def find_idle_watch(metric: str, cadence: Cadence, *, flag: str) -> str | None:
    """A warning where a run is evaluated after its last step alone; None otherwise.

    :param flag: says how often a run is evaluated.
    """
    interval = cadence.evaluate_every
    if not metric.startswith(HELD_OUT_PREFIX) or interval is None or interval < cadence.num_steps:
        return None
    return (
        f"--keep_best {metric} compares nothing: of {spell_count(cadence.num_steps, 'step')} with "
        f"{flag} {interval} only the last is evaluated; give fewer steps between evaluations"
    )


def choose_better_step(
    best: BestStep | None,
    step: int,
    row: Mapping[str, Any],
    *,
    metric: str,
) -> BestStep | None:
    """The better of `step` and the `best` before it, by the value of `metric` in the step's `row`.

    It is the former best where both are as good, or where `row` has no finite value.
    """
    value = row.get(metric)
    if value is None or not is_number(value):  # which NaN and infinity are not
        return best
    if best is not None and not metric_entry(metric).improves(value, best.value):
        return best
    return BestStep(step=step, metric=metric, value=float(value))


class BestStepWatch:
    """Follows the best step of a run, and keeps `best.json`.

    Every method is collective: rank 0 compares, and all ranks get what it finds. GRPO's driver is a
    rank of its own.

    Args:
        metric: of `--keep_best`.
        directory: of the run.
        until: the step that the run stands at; later ones, which it takes again, are not looked at.
    """

    def __init__(self, metric: str, directory: RunDirectory, *, until: int) -> None:
        self.metric = metric
        self.directory = directory
        self.best: BestStep | None = run_on_main_process(lambda: self._find(until))

    @property
    def step(self) -> int | None:
        """The best step; None where none was compared yet."""
        if self.best is None:
            return None
        return self.best.step

    @property
    def no_best_warning(self) -> str:
        """The warning of a run that ends without a best step."""
        return (
            f"--keep_best {self.metric}: no step with a checkpoint has a finite value of it; the "
            "last is exported"
        )

    def improves(self, step: int, row: Mapping[str, Any], *, is_saved: bool) -> bool:
        """Whether `step`, whose metrics are in `row`, is the best so far.

        Then it must have a checkpoint.

        Args:
            is_saved: whether it has one anyway. A metric of training is compared only then: most
                steps of a run that learns are a little better than those before them.
        """
        if not is_saved and not self.metric.startswith(HELD_OUT_PREFIX):
            return False
        before = self.best
        self.best = run_on_main_process(lambda: self._compare(step, row))
        return self.best != before

    def _compare(self, step: int, row: Mapping[str, Any]) -> BestStep | None:
        best = choose_better_step(self.best, step, row, metric=self.metric)
        if best != self.best:
            self.directory.write_best_step(best)
        return best

    def _find(self, until: int) -> BestStep | None:
        """The best step up to `until` that has a checkpoint, from the rows of the run's files."""
        steps = {step_of(path) for path in find_checkpoints(self.directory.path)}
        path = self.directory.metrics
        if self.metric.startswith(HELD_OUT_PREFIX):
            path = self.directory.evaluations
        best: BestStep | None = None
        for row in read_rows(path):
            if row["step"] <= until and row["step"] in steps:
                best = choose_better_step(best, int(row["step"]), row, metric=self.metric)
        self.directory.write_best_step(best)
        return best
