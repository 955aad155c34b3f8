"""Log-probs of a data set's replies under a sharded model with its present weights.

Legend: N rows that are asked for, D documents of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from open_instruct.data.token_dataset import TokenDataset
from open_instruct.learner.model.float8 import float8_off
from open_instruct.learner.policy import Policy
from open_instruct.learner.rows.ahead import built_ahead
from open_instruct.losses.logprobs import sum_by_reply
from open_instruct.models.shards import reshard
from open_instruct.packing.documents import on_device
from open_instruct.packing.steps import BatchShape, step_batch
from open_instruct.parallel.peers import doing
from open_instruct.records import Batch, StepBatch
from open_instruct.run.console import Console


class Scorer:
    """Scores rows by the forward pass that trains them, cut into steps and summed over replies as in training.

    Every data-parallel rank calls `score` together and gets the same array.
    """

    def __init__(self, policy: Policy, *, shape: BatchShape, console: Console) -> None:
        self.policy = policy
        self.model = policy.computing_model
        self.dp_group = policy.dp_process_group
        self.device = policy.device
        self.shape = shape
        self.console = console

    @torch.no_grad()
    def score(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> np.ndarray:
        """Sums over the replies of each document of `rows`: float32 array (N, D); of a pair, chosen then rejected.

        For a loss that sums several values, the sums of each value stand side by side.
        """
        num_documents = dataset.documents_per_row
        zeros_ND = torch.zeros(len(rows), num_documents, dtype=torch.float32, device=self.device)
        columns: list[torch.Tensor] = []
        position_of = {rows[j]: j for j in range(len(rows))}
        was_training = self.model.training
        self.model.eval()
        for batch in self.batches(dataset, rows, title=title):
            with float8_off(self.model):
                scores = self.policy.scores(batch)
            values = on_device(batch.values, self.device)
            summed = self.policy.loss.summed(scores, replace(batch, values=values))
            columns = columns or [zeros_ND.clone() for _ in summed]
            positions = torch.tensor([position_of[row] for row in batch.row_ids], dtype=torch.long)
            for column_ND, values_N in zip(columns, summed, strict=True):
                sums_S, _ = sum_by_reply(
                    values_N, scores.sequence_ids_N, batch.packed.num_sequences, self.policy.loss.ld_alpha
                )
                column_ND[on_device(positions, self.device)] = sums_S.view(num_documents, -1).T.float()
        values_ND = torch.cat(columns or [zeros_ND], dim=1)
        if dist.get_world_size(self.dp_group) > 1:
            # Each row was computed on one rank and is zero on the others.
            dist.all_reduce(values_ND, group=self.dp_group)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        self.model.train(was_training)
        return values_ND.cpu().numpy()

    def batches(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> Iterator[Batch]:
        """This rank's microbatches of `rows`; every rank has the same number, and ranks go through them together."""
        doing(f"scoring rows ({title})")
        rank, num_ranks = dist.get_rank(self.dp_group), dist.get_world_size(self.dp_group)
        # Rows of like length share a step, so that padding and waiting are short.
        order = sorted(range(len(rows)), key=lambda j: (-int(dataset.num_tokens[rows[j]]), j))
        size = self.shape.max_samples_per_rank * num_ranks

        def build(start: int) -> StepBatch:
            samples = [(rows[j],) for j in order[start : start + size]]
            return step_batch(dataset, samples, shape=self.shape, rank=rank, num_ranks=num_ranks)

        with self.console.counting(title) as on_progress:
            for done, step in enumerate(built_ahead(build, range(0, len(order), size)), start=1):
                yield from step.microbatches
                on_progress(min(done * size, len(order)), len(order))
