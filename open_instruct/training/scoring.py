"""Rows are scored by a sharded model with its present weights; the numbers of frozen models are
kept, and read again.

These are the log-probs of replies under the start model, and what is kept of a teacher's
distributions. The held-out rows of a run are scored before, during and after training; the results
go to `eval.jsonl`.

A row's key in a cache covers its token ids and spans, so tokenizer, template and truncation. The
name of the file of log-probs covers the weights, the configuration, the precision, and the layout
of rows (padded, packed, or with shared prompts), since layouts differ by rounding. It holds sums
over the reply: a loss that averages divides by the length itself, so all losses share the same
file. Sums that leave tokens out have a folder of their own.

Legend: N rows that are asked for, or labelled tokens, D documents of a row, V vocabulary, C numbers
kept of a distribution.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer

from open_instruct.batching.documents import on_device
from open_instruct.batching.steps import BatchShape, step_batch
from open_instruct.config.training import TrainingConfig
from open_instruct.core.records import Batch, StepBatch
from open_instruct.core.text import counted
from open_instruct.data.files.array_file import find_cache_folder, read_arrays, write_arrays
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.losses.logprobs import sum_by_reply
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.hf.hf_config import fingerprint_with
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.models.shards import reshard, whole_of
from open_instruct.objectives.objective import Evaluation, Objective
from open_instruct.parallel.process import gathered, on_main_process
from open_instruct.parallel.status import this_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.model.float8 import float8_off
from open_instruct.training.model.forward import token_logprobs
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Comparison, build_teacher
from open_instruct.training.rows.sample_loader import built_ahead

log = logging.getLogger(__name__)

KEY_NUM_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scores rows by the forward pass that trains them, cut into steps and summed over replies as
    in training.

    Every data-parallel rank calls `score` together and gets the same array.
    """

    policy: Policy
    shape: BatchShape
    run: Run
    config: TrainingConfig

    @torch.no_grad()
    def score(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> np.ndarray:
        """Sums over the replies of each document of `rows`: float32 array (N, D); of a pair, chosen
        then rejected.

        For a loss that sums several values, the sums of each value stand side by side.
        """
        model, group = self.policy.computing_model, self.policy.dp_process_group
        num_documents, device = dataset.documents_per_row, self.policy.device
        columns: list[torch.Tensor] = []
        position_of = {rows[j]: j for j in range(len(rows))}
        self.policy.backend.set_mode("eval")
        for batch in self.batches(dataset, rows, title=title):
            with float8_off(model):
                scores = self.policy.scores(batch)
            values = on_device(batch.values, device)
            summed = self.policy.loss.sum_columns(scores, replace(batch, values=values))
            columns = columns or [
                torch.zeros(len(rows), num_documents, device=device) for _ in summed
            ]
            positions = torch.tensor([position_of[row] for row in batch.row_ids], dtype=torch.long)
            for column_ND, values_N in zip(columns, summed, strict=True):
                sums_S, _ = sum_by_reply(
                    values_N,
                    scores.sequence_ids_N,
                    batch.packed.num_sequences,
                    self.policy.loss.ld_alpha,
                )
                column_ND[on_device(positions, device)] = sums_S.view(num_documents, -1).T.float()
        values_ND = torch.cat(columns, dim=1)
        if dist.get_world_size(group) > 1:
            # Each row was computed on one rank and is zero on the others.
            dist.all_reduce(values_ND, group=group)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(model)
        return values_ND.cpu().numpy()

    def batches(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> Iterator[Batch]:
        """This rank's microbatches of `rows`; every rank has the same number, and ranks go through
        them together.
        """
        this_process.begin(f"scoring rows ({title})")
        group = self.policy.dp_process_group
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        # Rows of like length share a step, so that padding and waiting are short.
        order = sorted(range(len(rows)), key=lambda j: (-int(dataset.num_tokens[rows[j]]), j))
        size = self.shape.max_samples_per_rank * num_ranks

        def build(start: int) -> StepBatch:
            samples = [(rows[j],) for j in order[start : start + size]]
            return step_batch(
                dataset,
                samples,
                shape=self.shape,
                rank=rank,
                num_ranks=num_ranks,
                values_class=self.policy.loss.values_class,
            )

        with self.run.console.counting(title) as on_progress:
            for done, step in enumerate(built_ahead(build, range(0, len(order), size)), start=1):
                yield from step.microbatches
                on_progress(min(done * size, len(order)), len(order))


class RowCache:
    """A file that maps each row's key to any number of float32 values; the same on every rank.

    It is empty where there is no file, or a damaged one, which the next `write` replaces.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: list[np.ndarray] = []  # those of the file, and of each row behind them
        # Start and stop among the values, in the order of the file.
        self._place_of: dict[str, tuple[int, int]] = {}

        try:
            arrays, _ = read_arrays(self.path)
            keys = [key.tobytes().hex() for key in arrays["keys"]]
            self._place_of = dict(zip(keys, pairwise(arrays["edges"].tolist()), strict=True))
            self._values = [arrays["values"]]
        except FileNotFoundError:
            return
        except (KeyError, ValueError) as error:
            log.warning("%s cannot be read (%s): computing it again", self.path, error)

    def __len__(self) -> int:
        return len(self._place_of)

    def missing(self, dataset: TokenDataset) -> list[int]:
        """The first row of `dataset` for every key that the cache lacks."""
        first_of = {dataset.key(row): row for row in reversed(range(len(dataset)))}
        return sorted(row for key, row in first_of.items() if key not in self._place_of)

    def add(self, key: str, values: np.ndarray) -> None:
        """Add a row, unless the cache has it; `write` puts it on disk."""
        if key not in self._place_of:
            start = next(reversed(self._place_of.values()), (0, 0))[1]
            self._place_of[key] = (start, start + values.size)
            self._values.append(values.reshape(-1))

    def write(self) -> None:
        """Put the whole file in place."""
        keys = np.frombuffer(bytes.fromhex("".join(self._place_of)), dtype=np.uint8).reshape(
            -1, KEY_NUM_BYTES
        )
        edges = np.array([0, *(stop for _, stop in self._place_of.values())], dtype=np.int64)
        write_arrays(self.path, {"keys": keys, "edges": edges, "values": self._all()}, {})

    def numbers(self, dataset: TokenDataset) -> np.ndarray:
        """The numbers of all rows of `dataset`, float32 (N, D); the cache must have D numbers for
        each row.
        """
        places_N2, values = self._places(dataset), self._all()
        return np.array([values[start:stop] for start, stop in places_N2], dtype=np.float32)

    def beside(self, dataset: TokenDataset) -> TokenDataset:
        """`dataset` with the numbers of its rows as their values; the cache must have all rows."""
        rows, values = copy(dataset), self._all()
        rows.details_C = values.view(np.uint8)
        rows.bounds_N4 = np.concatenate(
            [dataset.bounds_N4[:, :2], self._places(dataset) * values.itemsize], axis=1
        )
        return rows

    def _places(self, dataset: TokenDataset) -> np.ndarray:
        return np.array(
            [self._place_of[dataset.key(row)] for row in range(len(dataset))], dtype=np.int64
        )

    def _all(self) -> np.ndarray:
        if len(self._values) > 1:
            self._values = [np.concatenate(self._values)]
        return self._values[0]


def open_row_cache(folder: Path, model: Pretrained, *words: str) -> RowCache:
    """Open the cache of a frozen model's numbers; `words` name everything else that the numbers
    depend on.

    Collective: all ranks see the same rows before any of them writes.
    """
    fingerprint = fingerprint_with(model.hf_config.to_dict(), model.files.fingerprint)
    cache = RowCache(folder / f"{'-'.join([fingerprint[:32], *words])}.safetensors")
    dist.barrier()
    return cache


def reference_logprobs(
    scorer: Scorer, dataset: TokenDataset, *, cache: RowCache, title: str
) -> np.ndarray:
    """Reference log-probs of all rows, float32 (N, D): from the cache, and by a forward pass for
    those it lacks.

    The model must still hold the weights it started from. Every rank enters together and all return
    the same arrays; rank 0 writes the file.
    """
    missing = cache.missing(dataset)
    scorer.run.console.say(
        f"{title}: {counted(len(cache), 'row')} cached, {len(missing):,} to compute"
    )
    if missing:
        for row, values_D in zip(missing, scorer.score(dataset, missing, title=title), strict=True):
            cache.add(dataset.key(row), values_D)
        on_main_process(cache.write)
    return cache.numbers(dataset)


def open_reference_cache(
    folder: Path, pretrained: Pretrained, *, precision: str, shape: BatchShape
) -> RowCache:
    """The cache file of these weights in this precision and layout; every rank reads what is in it
    now.
    """
    laid_out = f"packed-sharing-{shape.prefix_sharing}" if shape.packing else "padded"
    return open_row_cache(folder, pretrained, precision, laid_out, str(shape.documents_per_sample))


def compare_with(
    opened: Comparison,
    rows: TokenDataset,
    heldout: TokenDataset | None,
    *,
    student: Pretrained,
    scorer: Scorer,
) -> tuple[Comparison, TokenDataset, TokenDataset | None]:
    """The teacher to compare the policy with, and both data sets. Collective; call it after the
    policy is built.

    Where only a part of each distribution is kept, the rows carry it, from the cache or from a pass
    of the teacher, which is freed afterwards.
    """
    config = scorer.config
    build = partial(
        build_teacher,
        opened.pretrained,
        student,
        scorer.policy.computing_model,
        run=scorer.run,
        config=config,
    )
    if opened.teacher.keep is None:
        model = build()
        head_VD = whole_of(model.lm_head.w_out.weight, getattr(torch, config.model.param_dtype)).to(
            model.device
        )
        return replace(opened, model=model, head_VD=head_VD), rows, heldout
    folder, laid_out = (
        find_cache_folder(config.data.cache_dir),
        "packed" if scorer.shape.packing else "padded",
    )
    words = (config.frozen_as, laid_out, opened.teacher.kept_as, str(opened.vocab_size))
    cache = open_row_cache(folder / "teacher_distributions", opened.pretrained, *words)
    datasets = [dataset for dataset in (rows, heldout) if dataset is not None]
    num_missing = len({dataset.key(row) for dataset in datasets for row in cache.missing(dataset)})
    scorer.run.console.say(
        f"teacher's distributions: {counted(len(cache), 'row')} cached, {num_missing:,} to compute"
    )
    if num_missing:
        model = build()
        with adapters_off(model):
            for dataset in datasets:
                _keep(opened, model, dataset, cache, scorer)
        on_main_process(cache.write)
    return opened, cache.beside(rows), None if heldout is None else cache.beside(heldout)


@torch.no_grad()
def _keep(
    opened: Comparison, model: Transformer, dataset: TokenDataset, cache: RowCache, scorer: Scorer
) -> None:
    """Run the teacher over the rows that `cache` lacks, and add the kept numbers to the cache, on
    every rank.
    """
    keep = opened.teacher.keep
    assert keep is not None
    measure = Measure(lambda logits_NV: keep(opened.shared_logits(logits_NV)))
    for batch in scorer.batches(dataset, cache.missing(dataset), title="teacher's distributions"):
        kept_NC = token_logprobs(
            model, batch.packed, device=scorer.policy.device, measure=measure
        ).measured_N
        assert kept_NC is not None
        lengths = dataset.num_label_tokens[list(batch.row_ids)].tolist()
        kept_by_row = zip(batch.row_ids, kept_NC.float().cpu().split(lengths), strict=True)
        own = {dataset.key(row): values_NC.numpy() for row, values_NC in kept_by_row}
        for rows_of_rank in gathered(own, scorer.policy.dp_process_group):
            for key, values_NC in rows_of_rank.items():
                cache.add(key, values_NC)
    reshard(model)


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
        """The evaluation of an earlier `step`, whose weights the model has again; `eval.jsonl` has
        it already.

        Rows are not scored for an objective whose evaluations add nothing to the exported
        config.json: the last evaluation is returned then.
        """
        assert self._last is not None, "the last step was evaluated"
        _, last = self._last
        return self._score(step) if last.exported else last

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
        """The entries of an evaluation in a row of metrics.jsonl: its numbers, and the seconds that
        it took.
        """
        began_s = time.perf_counter()
        row = self.evaluate(step).row
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        return numbers | {"time/evaluation": time.perf_counter() - began_s}
