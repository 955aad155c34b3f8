"""Data sets of token ids as flat arrays, built once and then mapped from the cache.

Legend for array names: N rows of the data set, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from open_instruct.data.cache import DamagedFile, cache_root, read_arrays, write_arrays
from open_instruct.data.chat import ChatFormat, choose_chat_template
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.rows import open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

# Part of the cache key: raise it when the code makes other arrays of the same rows.
CACHE_VERSION = 1

ItemT = TypeVar("ItemT")


class TokenDataset(ABC, Generic[ItemT]):
    """Tokenised rows in mixture order, as arrays that can be mapped from a file. Repeated rows share their tokens.

    Attributes:
        token_ids_T: int32; the tokens of every distinct row.
        keys_N32: uint8; sha256 of each row: its token ids, where its pieces start and stop, what is kept beside them.
        num_tokens: int64 (N,); tokens that each row puts before the model.
    """

    def __init__(self, *, token_ids_T: np.ndarray, keys_N32: np.ndarray, num_tokens: np.ndarray) -> None:
        assert keys_N32.shape == (len(num_tokens), 32)
        self.token_ids_T = token_ids_T
        self.keys_N32 = keys_N32
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self.keys_N32)

    def __iter__(self) -> Iterator[ItemT]:
        return (self[i] for i in range(len(self)))

    @abstractmethod
    def __getitem__(self, index: int) -> ItemT: ...

    def key(self, index: int) -> str:
        """Hex hash of row `index`: equal rows, and only they, share it."""
        return self.keys_N32[index].tobytes().hex()

    @property
    def fingerprint(self) -> str:
        """Hash of all keys in their order."""
        return hashlib.sha256(np.ascontiguousarray(self.keys_N32).data).hexdigest()


DatasetT = TypeVar("DatasetT")


def load_token_dataset(
    dataset_of: Callable[..., DatasetT],
    builder_of: Callable[..., RowBuilder],
    *,
    mixer_list: Sequence[str],
    splits: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    chat_template_name: str | None,
    on_bad_row: Literal["error", "skip"],
    seed: int,
    cache_dir: str | Path | None,
    flag: str = "--mixer_list",
    facts: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **own: Any,
) -> tuple[DatasetT, DataReport]:
    """The tokenised mixture, from the cache where the same has been asked for before.

    `dataset_of` takes the arrays that the builder makes; `own` are the arguments of this kind of builder, such as
    `max_seq_length`, as JSON can write them; `facts` are what the arrays depend on beside all that, as JSON too.
    Nothing here speaks of ranks: let one rank call it first, then, past a barrier, the others; they find the file.
    `on_progress(done, total)` counts distinct rows while they are tokenised.

    Raises:
        InputError: see `parse_mixer_list`, `open_rows` and `choose_chat_template`; a row is malformed and
            `on_bad_row` is "error"; or nothing is left.
        RunError: the disk is full.
    """
    chat = ChatFormat(tokenizer, choose_chat_template(tokenizer, chat_template_name))
    builder = builder_of(chat, on_bad_row=on_bad_row, **own)
    entries = parse_mixer_list(mixer_list, splits, flag=flag)
    sources = [open_rows(entry.name, entry.split, flag=flag) for entry in entries]
    identity = {
        "version": CACHE_VERSION,
        "mixture": [
            (source.fingerprint, source.name, entry.split, repr(entry.amount))
            for source, entry in zip(sources, entries, strict=True)
        ],
        "chat": chat.fingerprint,
        "on_bad_row": on_bad_row,
        "seed": seed,
        "own": {**own, **(facts or {})},
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
    path = cache_root(cache_dir) / f"{builder.unit}s" / f"{digest[:32]}.safetensors"
    try:
        return _read(path, dataset_of)
    except FileNotFoundError:
        pass
    except DamagedFile as error:
        log.warning("%s; building it again", error)
    arrays, report = builder.build(entries, sources, seed=seed, on_progress=on_progress)
    write_arrays(path, arrays, {"report": report.to_json()})
    return dataset_of(**arrays), replace(report, cache_file=str(path))


def _read(path: Path, dataset_of: Callable[..., DatasetT]) -> tuple[DatasetT, DataReport]:
    arrays, metadata = read_arrays(path)
    try:
        report = DataReport.from_json(metadata["report"])
        return dataset_of(**arrays), replace(report, cache_file=str(path), from_cache=True)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{path} is of another version: {error}") from error
