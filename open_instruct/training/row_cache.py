"""The numbers that a frozen model gave rows, in a file: they are computed once and read again.

A row's key covers its token ids and spans, so tokenizer, template and truncation. The name of the
file covers the weights, the configuration, the precision, and the layout of rows (padded, packed,
or with shared prompts), since layouts differ by rounding.

Legend: N rows of a data set, D numbers of a row.
"""

import logging
from copy import copy
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch.distributed as dist

from open_instruct.data.files.array_file import read_arrays, write_arrays
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.hf.hf_config import fingerprint_model
from open_instruct.run.pretrained import Pretrained

log = logging.getLogger(__name__)

KEY_NUM_BYTES = 32


class RowCache:
    """A file that maps each row's key to any number of float32 values; the same on every rank.

    It is empty where there is no file, or a damaged one, which the next `write` replaces.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Those of the file, then of each row that was added.
        self._values: list[np.ndarray] = []
        # Start and stop among the values, by key and in the order of the file.
        self._places: dict[str, tuple[int, int]] = {}

        try:
            arrays, _ = read_arrays(self.path)
            keys = [key.tobytes().hex() for key in arrays["keys"]]
            edges = arrays["edges"].tolist()
            self._places = dict(zip(keys, pairwise(edges), strict=True))
            self._values = [arrays["values"]]
        except FileNotFoundError:
            return
        except (KeyError, ValueError) as error:
            log.warning("%s cannot be read (%s): computing it again", self.path, error)

    def __len__(self) -> int:
        return len(self._places)

    def find_missing_rows(self, dataset: TokenDataset) -> list[int]:
        """The first row of `dataset` for every key that the cache lacks."""
        first_rows = {dataset.key(row): row for row in reversed(range(len(dataset)))}
        return sorted(row for key, row in first_rows.items() if key not in self._places)

    def add(self, key: str, values: np.ndarray) -> None:
        """Add a row, unless the cache has it; `write` puts it on disk."""
        if key not in self._places:
            start = next(reversed(self._places.values()), (0, 0))[1]
            self._places[key] = (start, start + values.size)
            self._values.append(values.reshape(-1))

    def write(self) -> None:
        """Put the whole file in place."""
        key_bytes = bytes.fromhex("".join(self._places))
        keys = np.frombuffer(key_bytes, dtype=np.uint8).reshape(-1, KEY_NUM_BYTES)
        stops = [stop for _, stop in self._places.values()]
        edges = np.array([0, *stops], dtype=np.int64)
        arrays: dict[str, np.ndarray] = {
            "keys": keys,
            "edges": edges,
            "values": self._join_values(),
        }
        write_arrays(self.path, arrays, {})

    def read_numbers(self, dataset: TokenDataset) -> np.ndarray:
        """The numbers of all rows of `dataset`, float32 (N, D); the cache must have D of each."""
        places_N2 = self._find_places(dataset)
        values = self._join_values()
        return np.array([values[start:stop] for start, stop in places_N2], dtype=np.float32)

    def attach_numbers(self, dataset: TokenDataset) -> TokenDataset:
        """`dataset` with the numbers of its rows as their values; the cache must have all rows."""
        values = self._join_values()
        byte_places_N2 = self._find_places(dataset) * values.itemsize
        rows = copy(dataset)
        rows.details_C = values.view(np.uint8)
        rows.bounds_N4 = np.concatenate([dataset.bounds_N4[:, :2], byte_places_N2], axis=1)
        return rows

    def _find_places(self, dataset: TokenDataset) -> np.ndarray:
        places = [self._places[dataset.key(row)] for row in range(len(dataset))]
        return np.array(places, dtype=np.int64)

    def _join_values(self) -> np.ndarray:
        if len(self._values) > 1:
            self._values = [np.concatenate(self._values)]
        return self._values[0]


def open_row_cache(folder: Path, model: Pretrained, *words: str) -> RowCache:
    """Open the cache of a frozen model's numbers.

    Collective: all ranks see the same rows before any of them writes.

    :param words: name everything else that the numbers depend on.
    """
    fingerprint = fingerprint_model(model.hf_config.to_dict(), model.files.fingerprint)
    name = "-".join([fingerprint[:32], *words])
    cache = RowCache(folder / f"{name}.safetensors")
    dist.barrier()
    return cache
