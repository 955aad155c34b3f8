"""Rows are scored by the policy with its present weights: before, during and after training.

Before training these are the log-probs of replies under the start model, which a cache keeps. The
held-out rows are scored all along; the results go to `eval.jsonl`.

The cache has sums over the reply: a loss that averages divides by the length itself, so all losses
share the same file. Sums that leave tokens out have a folder of their own.

Legend: N rows that are asked for, or labelled tokens, D documents of a row, S documents of a batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from open_instruct.batching.documents import move_to_device
from open_instruct.batching.steps import BatchShape
from open_instruct.config.training import TrainingConfig
from open_instruct.core.text import spell_count
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.losses.logprobs import sum_by_reply
from open_instruct.models.shards import reshard
from open_instruct.objectives.objective import Evaluation, Objective
from open_instruct.parallel.process import run_on_main_process
from open_instruct.run.console import Console
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.model.float8 import float8_off
from open_instruct.training.policy import Policy
from open_instruct.training.row_cache import RowCache, open_row_cache
from open_instruct.training.rows.scoring_batches import scoring_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scores rows by the forward pass that trains them, and sums over replies as in training."""

    policy: Policy
    shape: BatchShape
    run: Run
    config: TrainingConfig

    def score(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> np.ndarray:
        """Sums over the replies of each document of `rows`, see `score_rows`."""
        return score_rows(
            self.policy,
            dataset,
            rows,
            shape=self.shape,
            console=self.run.console,
            title=title,
        )


@torch.no_grad()
def score_rows(
    policy: Policy,
    dataset: TokenDataset,
    rows: Sequence[int],
    *,
    shape: BatchShape,
    console: Console,
    title: str,
) -> np.ndarray:
    """Sums over the replies of each document of `rows`, float32 (N, D); chosen comes first.

    For a loss that sums several values, the sums of each value stand side by side. Every
    data-parallel rank calls it together and gets the same array.
    """
    model = policy.computing_model
    group = policy.dp_process_group
    device = policy.device
    num_documents = dataset.documents_per_row
    columns: list[torch.Tensor] = []
    positions = {row: position for position, row in enumerate(rows)}
    policy.backend.set_mode("eval")
    batches = scoring_batches(
        dataset,
        rows,
        shape=shape,
        dp_process_group=group,
        console=console,
        title=title,
        values_class=policy.loss.values_class,
    )
    for batch in batches:
        with float8_off(model):
            scores = policy.score(batch)
        values = move_to_device(batch.values, device)
        sums = policy.loss.sum_columns(scores, replace(batch, values=values))
        if not columns:
            columns = [torch.zeros(len(rows), num_documents, device=device) for _ in sums]
        # A rank beyond the last rows has a batch of none.
        batch_rows = [positions[row] for row in batch.row_ids]
        batch_positions = move_to_device(torch.tensor(batch_rows, dtype=torch.long), device)
        for column_ND, values_N in zip(columns, sums, strict=True):
            sums_S, _ = sum_by_reply(
                values_N,
                scores.sequence_ids_N,
                batch.packed.num_sequences,
                policy.loss.ld_alpha,
            )
            column_ND[batch_positions] = sums_S.view(num_documents, -1).T.float()
    values_ND = torch.cat(columns, dim=1)
    if dist.get_world_size(group) > 1:
        # Each row was computed on one rank and is zero on the others.
        dist.all_reduce(values_ND, group=group)
    # A forward pass without a backward leaves FSDP's root parameters gathered.
    reshard(model)
    return values_ND.cpu().numpy()


def score_reference(
    scorer: Scorer,
    dataset: TokenDataset,
    *,
    cache: RowCache,
    title: str,
) -> np.ndarray:
    """Reference log-probs of all rows, float32 (N, D): those that the cache lacks are computed.

    The model must still hold the weights it started from. Every rank enters together and all return
    the same arrays; rank 0 writes the file.
    """
    missing = cache.find_missing_rows(dataset)
    scorer.run.console.say(
        f"{title}: {spell_count(len(cache), 'row')} cached, {len(missing):,} to compute"
    )
    if missing:
        values_ND = scorer.score(dataset, missing, title=title)
        for row, values_D in zip(missing, values_ND, strict=True):
            cache.add(dataset.key(row), values_D)
        run_on_main_process(cache.write)
    return cache.read_numbers(dataset)


def open_reference_cache(
    folder: Path,
    pretrained: Pretrained,
    *,
    precision: str,
    shape: BatchShape,
) -> RowCache:
    """The cache of these weights in this precision and layout, read by every rank."""
    row_layout = "padded"
    if shape.packing:
        row_layout = f"packed-sharing-{shape.prefix_sharing}"
    num_documents = str(shape.documents_per_sample)
    return open_row_cache(folder, pretrained, precision, row_layout, num_documents)


@dataclass
class Heldout:
    """The held-out rows of a run.

    `reference_ND` are the frozen log-probs of their documents, where there are any.
    """

    dataset: TokenDataset
    reference_ND: np.ndarray | None
    scorer: Scorer
    objective: Objective
    _last: tuple[int, Evaluation] | None = field(default=None, init=False)

    def evaluate(self, step: int) -> Evaluation:
        """Score the model as it is after `step` steps, once. Every rank enters together."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        evaluation = self._score(step)
        run = self.scorer.run
        if run.process.rank == 0:
            run.directory.write_evaluation({"step": step} | dict(evaluation.row))
        run.console.say(evaluation.sentence.format(when=f"at step {step}"))
        self._last = step, evaluation
        return evaluation

    def score_again(self, step: int) -> Evaluation:
        """The evaluation of an earlier `step`, whose weights the model has again.

        It stands in `eval.jsonl` already. Rows are not scored for an objective whose evaluations
        add nothing to the exported config.json: the last evaluation is returned then.
        """
        assert self._last is not None, "the last step was evaluated"
        _, last = self._last
        if not last.exported:
            return last
        return self._score(step)

    def _score(self, step: int) -> Evaluation:
        logps_ND = self.reference_ND
        # Before the first step policy and reference are the same weights.
        if step > 0 or logps_ND is None:
            title = f"held-out {self.objective.rows.unit}s at step {step}"
            logps_ND = self.scorer.score(self.dataset, range(len(self.dataset)), title=title)
        assert self.objective.scores_heldout_rows, "or there are no held-out rows"
        return self.objective.evaluate(
            self.dataset, logps_ND, self.reference_ND, self.scorer.config
        )

    def metrics(self, step: int) -> dict[str, float]:
        """The entries of an evaluation in a row of metrics.jsonl: its numbers, and its seconds."""
        began_s = time.perf_counter()
        row = self.evaluate(step).row
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        return numbers | {"time/evaluation": time.perf_counter() - began_s}
