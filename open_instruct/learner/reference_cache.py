"""Log-probs of the frozen start model: computed once with the sharded model itself, kept by content.

A row's key covers its token ids and spans (so the tokenizer, the template and the truncation); the file's
name covers the weights, the configuration, the precision, and how rows are laid out: padded, packed, or with shared
prompts, which differ by rounding. What is kept is the sum over the reply, so that losses
which average divide by the length themselves and share the same file.
Sums in which tokens do not all count are kept in a folder of their own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist
from safetensors.numpy import load_file, save_file

from open_instruct.config.sections import ModelSection
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.learner.scoring import Scorer
from open_instruct.models.fingerprint import with_config
from open_instruct.packing.steps import BatchShape
from open_instruct.parallel.process import on_main_process
from open_instruct.parallel.wording import counted
from open_instruct.run.pretrained import Pretrained

log = logging.getLogger(__name__)

KEY_NUM_BYTES = 32


class ReferenceCache:
    """One file of (row key -> log-prob of each of its D documents), for one set of weights, precision and layout."""

    def __init__(
        self, folder: Path, *, model_fingerprint: str, precision: str, laid_out: str, documents_per_row: int
    ) -> None:
        self.path = folder / f"{model_fingerprint[:32]}-{precision}-{laid_out}.safetensors"
        self._row_of: dict[bytes, int] = {}
        self._values_ND = np.zeros((0, documents_per_row), dtype=np.float32)

    def read(self) -> None:
        """Load what is there. A damaged file counts as empty, and is replaced by the next `add`."""
        if not self.path.exists():
            return
        try:
            stored = load_file(self.path)
            keys, values = stored["keys"], stored["logprobs"]
            assert keys.shape == (len(values), KEY_NUM_BYTES) and values.shape[1:] == self._values_ND.shape[1:]
        except Exception as error:
            log.warning("reference log-probs in %s cannot be read (%s): computing them again", self.path, error)
            return
        self._row_of = {key.tobytes(): row for row, key in enumerate(keys)}
        self._values_ND = values

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self._row_of

    def lookup(self, dataset: TokenDataset) -> np.ndarray:
        """The log-probs of every row of `dataset`, all of which must be here: float32 (N, D)."""
        return self._values_ND[[self._row_of[bytes.fromhex(dataset.key(i))] for i in range(len(dataset))]]

    def add(self, keys: Sequence[str], values_ND: np.ndarray) -> None:
        """Take rows in; `write` puts them on disk."""
        for key, row in zip(keys, range(len(self._values_ND), len(self._values_ND) + len(keys)), strict=True):
            self._row_of[bytes.fromhex(key)] = row
        self._values_ND = np.concatenate([self._values_ND, values_ND.astype(np.float32)])

    def write(self) -> None:
        """Put the whole file in place by a rename, so that a crash leaves the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(self._row_of.items())
        key_bytes = np.frombuffer(b"".join(key for key, _ in rows), dtype=np.uint8).reshape(-1, KEY_NUM_BYTES)
        values_ND = self._values_ND[[row for _, row in rows]]
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        save_file({"keys": key_bytes, "logprobs": values_ND}, partial)
        partial.replace(self.path)


def reference_logprobs(scorer: Scorer, dataset: TokenDataset, *, cache: ReferenceCache, title: str) -> np.ndarray:
    """Reference log-probs of all rows, float32 (N, D): from the cache, and by a forward pass for those it lacks.

    The model must still hold the weights it started from. Every rank enters together and all return
    the same arrays; rank 0 writes the file.
    """
    first_of: dict[str, int] = {}
    for row in range(len(dataset)):
        first_of.setdefault(dataset.key(row), row)
    missing = [row for key, row in first_of.items() if key not in cache]
    scorer.console.say(f"{title}: {counted(len(first_of) - len(missing), 'row')} cached, {len(missing):,} to compute")
    if missing:
        values_ND = scorer.score(dataset, missing, title=title)
        cache.add([dataset.key(row) for row in missing], values_ND)
        on_main_process(cache.write)
    return cache.lookup(dataset)


def open_reference_cache(
    folder: Path, pretrained: Pretrained, *, model: ModelSection, shape: BatchShape
) -> ReferenceCache:
    """The cache file of these weights in this precision and layout; every rank reads what is in it now."""
    cache = ReferenceCache(
        folder,
        model_fingerprint=with_config(pretrained.weights_fingerprint, pretrained.hf_config.to_dict()),
        precision=model.param_dtype,
        laid_out=f"packed-sharing-{shape.prefix_sharing}" if shape.packing else "padded",
        documents_per_row=shape.documents_per_sample,
    )
    cache.read()
    # All ranks must see the same rows before any of them writes.
    dist.barrier()
    return cache
