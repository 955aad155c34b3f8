"""Log-probs of the frozen start model: computed once with the sharded model itself, kept by content.

A row's key covers its token ids and spans (so the tokenizer, the template and the truncation); the file's
name covers the weights, the configuration and the precision. What is kept is the sum over the reply, so that losses
which average divide by the length themselves and share the same file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.train.train_module import TransformerTrainModule
from safetensors.numpy import load_file, save_file

from open_instruct.config.sections import ModelSection
from open_instruct.data.preference_dataset import PreferenceDataset
from open_instruct.models.export import reshard
from open_instruct.models.fingerprint import weights_fingerprint
from open_instruct.parallel.process import on_main_process
from open_instruct.training.console import Console
from open_instruct.training.forward import sequence_logprobs
from open_instruct.training.preference_loader import BatchShape, PairLogprobs, rank_step
from open_instruct.training.pretrained import Pretrained

log = logging.getLogger(__name__)

KEY_NUM_BYTES = 32
# What config.json says of the file's history, not of the forward pass.
NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


class ReferenceCache:
    """One file of (row key -> chosen and rejected log-prob) for one set of weights in one precision."""

    def __init__(self, folder: Path, *, model_fingerprint: str, precision: str) -> None:
        self.path = folder / f"{model_fingerprint[:32]}-{precision}.safetensors"
        self._row_of: dict[bytes, int] = {}
        self._values_N2 = np.zeros((0, 2), dtype=np.float32)

    def read(self) -> None:
        """Load what is there. A damaged file counts as empty, and is replaced by the next `add`."""
        if not self.path.exists():
            return
        try:
            stored = load_file(self.path)
            keys, values = stored["keys"], stored["logprobs"]
            assert keys.shape == (len(values), KEY_NUM_BYTES) and values.shape[1] == 2
        except Exception as error:
            log.warning("reference log-probs in %s cannot be read (%s): computing them again", self.path, error)
            return
        self._row_of = {key.tobytes(): row for row, key in enumerate(keys)}
        self._values_N2 = values

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self._row_of

    def lookup(self, dataset: PreferenceDataset) -> PairLogprobs:
        """The log-probs of every row of `dataset`, all of which must be here."""
        rows = [self._row_of[bytes.fromhex(dataset.key(i))] for i in range(len(dataset))]
        values_N2 = self._values_N2[rows]
        return PairLogprobs(chosen_N=values_N2[:, 0].copy(), rejected_N=values_N2[:, 1].copy())

    def add(self, keys: Sequence[str], values_N2: np.ndarray) -> None:
        """Take rows in; `write` puts them on disk."""
        for key, row in zip(keys, range(len(self._values_N2), len(self._values_N2) + len(keys)), strict=True):
            self._row_of[bytes.fromhex(key)] = row
        self._values_N2 = np.concatenate([self._values_N2, values_N2.astype(np.float32)])

    def write(self) -> None:
        """Put the whole file in place by a rename, so that a crash leaves the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(self._row_of.items())
        key_bytes = np.frombuffer(b"".join(key for key, _ in rows), dtype=np.uint8).reshape(-1, KEY_NUM_BYTES)
        values_N2 = self._values_N2[[row for _, row in rows]]
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        save_file({"keys": key_bytes, "logprobs": values_N2}, partial)
        partial.replace(self.path)


class PairScorer:
    """Log-probs of preference pairs under a sharded model as it is, by the forward pass that trains it.

    Every data-parallel rank calls `score` together and gets the same array.
    """

    def __init__(self, policy: TransformerTrainModule, *, shape: BatchShape, console: Console) -> None:
        self.model = policy.model
        self.dp_group = policy.dp_process_group
        self.device = policy.device
        self.shape = shape
        self.console = console

    @torch.no_grad()
    def score(self, dataset: PreferenceDataset, rows: Sequence[int], *, title: str) -> np.ndarray:
        """Sums over the replies of `rows`: float32 array (len(rows), 2), chosen then rejected."""
        rank, num_ranks = dist.get_rank(self.dp_group), dist.get_world_size(self.dp_group)
        # Rows of like length share a step, so that padding and waiting are short.
        order = sorted(range(len(rows)), key=lambda j: (-int(dataset.num_tokens[rows[j]]), j))
        position_of = {rows[j]: j for j in range(len(rows))}
        values_N2 = torch.zeros(len(rows), 2, dtype=torch.float32, device=self.device)
        num_pairs_per_step = self.shape.max_pairs_per_rank * num_ranks
        was_training = self.model.training
        self.model.eval()
        with self.console.counting(title) as on_progress:
            for start in range(0, len(order), num_pairs_per_step):
                indices = [rows[j] for j in order[start : start + num_pairs_per_step]]
                step = rank_step(dataset, indices, shape=self.shape, rank=rank, num_ranks=num_ranks)
                for batch in step.microbatches:
                    logprobs = sequence_logprobs(self.model, batch.packed, device=self.device)
                    positions = torch.tensor([position_of[row] for row in batch.row_ids], dtype=torch.long)
                    values_N2[positions.to(self.device)] = logprobs.sums_S.view(2, -1).T.float()
                on_progress(min(start + num_pairs_per_step, len(order)), len(order))
        if num_ranks > 1:
            # Each row was computed on one rank and is zero on the others.
            dist.all_reduce(values_N2, group=self.dp_group)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        self.model.train(was_training)
        return values_N2.cpu().numpy()

    def score_all(self, dataset: PreferenceDataset, *, title: str) -> PairLogprobs:
        """The log-probs of every row under the model as it is."""
        values_N2 = self.score(dataset, range(len(dataset)), title=title)
        return PairLogprobs(chosen_N=values_N2[:, 0].copy(), rejected_N=values_N2[:, 1].copy())


def reference_logprobs(
    scorer: PairScorer, dataset: PreferenceDataset, *, cache: ReferenceCache, title: str
) -> PairLogprobs:
    """Reference log-probs of all rows: from the cache, and by a forward pass for those it lacks.

    The model must still hold the weights it started from. Every rank enters together and all return
    the same arrays; rank 0 writes the file.
    """
    first_of: dict[str, int] = {}
    for row in range(len(dataset)):
        first_of.setdefault(dataset.key(row), row)
    missing = [row for key, row in first_of.items() if key not in cache]
    scorer.console.say(f"{title}: {len(first_of) - len(missing):,} rows cached, {len(missing):,} to compute")
    if missing:
        values_N2 = scorer.score(dataset, missing, title=title)
        cache.add([dataset.key(row) for row in missing], values_N2)
        on_main_process(cache.write)
    return cache.lookup(dataset)


def open_reference_cache(cache_folder: Path, pretrained: Pretrained, *, model: ModelSection) -> ReferenceCache:
    """The cache file of these weights in this precision; every rank reads what is in it now."""
    cache = ReferenceCache(
        cache_folder / "reference_logprobs", model_fingerprint=_fingerprint(pretrained), precision=model.param_dtype
    )
    cache.read()
    # All ranks must see the same rows before any of them writes.
    dist.barrier()
    return cache


def _fingerprint(pretrained: Pretrained) -> str:
    """The weights and what config.json makes of them: the same tensors under another window are another model."""
    config = pretrained.hf_config.to_dict()
    computed_with = {name: value for name, value in config.items() if name not in NOT_COMPUTED_WITH}
    text = json.dumps(computed_with, sort_keys=True, default=str)
    return hashlib.sha256((weights_fingerprint(pretrained.files) + text).encode()).hexdigest()
