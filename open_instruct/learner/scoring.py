"""Log-probs of a data set's replies under a sharded model as it is.

Legend: N rows that are asked for or tokens of a microbatch, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from open_instruct.data.token_dataset import TokenDataset
from open_instruct.learner.backend import Learner
from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.models.shards import reshard
from open_instruct.packing.steps import BatchShape, step_batch
from open_instruct.parallel.peers import doing
from open_instruct.records import Batch
from open_instruct.run.console import Console


class Scorer:
    """Scores rows by the forward pass that trains them, cut into steps as in training.

    Every data-parallel rank calls `score` together and gets the same array.
    """

    def __init__(self, policy: Learner, *, shape: BatchShape, console: Console) -> None:
        self.policy = policy
        self.model = policy.computing_model
        self.dp_group = policy.dp_process_group
        self.device = policy.device
        self.shape = shape
        self.console = console

    @torch.no_grad()
    def score(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> np.ndarray:
        """Sums over the replies of each document of `rows`: float32 array (N, D); of a pair, chosen then rejected.

        With a teacher it is (N, 2D): behind the log-probs the sums of what was compared with it.
        """
        position_of = {rows[j]: j for j in range(len(rows))}
        num_documents = dataset.documents_per_row
        values = torch.zeros(len(rows), 0, dtype=torch.float32, device=self.device)
        was_training = self.model.training
        self.model.eval()
        for batch in self.batches(dataset, rows, title=title):
            scores = self.policy.scores(batch)
            of_tokens = [scores.logprobs_N] + ([] if scores.measured_N is None else [scores.measured_N])
            sums = torch.cat(
                [
                    sum_by_sequence(each_N, scores.sequence_ids_N, batch.packed.num_sequences)[0].view(
                        num_documents, -1
                    )
                    for each_N in of_tokens
                ]
            )
            if values.numel() == 0:
                values = values.new_zeros(len(rows), len(sums))
            positions = torch.tensor([position_of[row] for row in batch.row_ids], dtype=torch.long)
            values[positions.to(self.device)] = sums.T.float()
        if dist.get_world_size(self.dp_group) > 1:
            # Each row was computed on one rank and is zero on the others.
            dist.all_reduce(values, group=self.dp_group)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        self.model.train(was_training)
        return values.cpu().numpy()

    def batches(self, dataset: TokenDataset, rows: Sequence[int], *, title: str) -> Iterator[Batch]:
        """This rank's microbatches of `rows`; every rank has as many, and goes through them together."""
        doing(f"scoring rows ({title})")
        rank, num_ranks = dist.get_rank(self.dp_group), dist.get_world_size(self.dp_group)
        # Rows of like length share a step, so that padding and waiting are short.
        order = sorted(range(len(rows)), key=lambda j: (-int(dataset.num_tokens[rows[j]]), j))
        num_rows_per_step = self.shape.max_samples_per_rank * num_ranks
        with self.console.counting(title) as on_progress:
            for start in range(0, len(order), num_rows_per_step):
                indices = [rows[j] for j in order[start : start + num_rows_per_step]]
                yield from step_batch(dataset, indices, shape=self.shape, rank=rank, num_ranks=num_ranks).microbatches
                on_progress(min(start + num_rows_per_step, len(order)), len(order))

    def score_all(self, dataset: TokenDataset, *, title: str) -> np.ndarray:
        """`score` of every row."""
        return self.score(dataset, range(len(dataset)), title=title)
