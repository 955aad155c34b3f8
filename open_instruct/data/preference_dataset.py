"""Preference pairs, tokenised once and kept as flat arrays.

Legend for array names: N pairs of the data set, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from open_instruct.data.cache import DamagedFile, cache_root, read_arrays, write_arrays
from open_instruct.data.chat import ChatFormat, choose_chat_template
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.preference_builder import PreferenceBuilder
from open_instruct.data.report import DataReport
from open_instruct.data.rows import open_rows
from open_instruct.errors import InputError
from open_instruct.records import Document, PreferenceExample, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

# Part of the cache key: raise it when the code makes other arrays of the same rows.
CACHE_VERSION = 1


class PreferenceDataset:
    """Tokenised pairs in mixture order, as arrays that can be mapped from a file.

    Attributes:
        token_ids_T: int32; for each distinct pair its prompt, then the chosen, then the rejected reply.
        bounds_N4: int64; where pair n's prompt starts and stops and its chosen and its rejected reply stop in
            `token_ids_T`. Repeated rows share their tokens.
        keys_N32: uint8; sha256 of each pair's token ids and spans.
        chosen_response_lengths, rejected_response_lengths: int64 (N,); tokens of each reply.
        chosen_lengths, rejected_lengths: int64 (N,); tokens of each conversation, prompt included.
        num_tokens: int64 (N,); their sum, as `PreferenceExample.num_tokens`.
        chosen_response_lengths, rejected_response_lengths: int64 (N,); tokens of each reply alone.
    """

    def __init__(self, *, token_ids_T: np.ndarray, bounds_N4: np.ndarray, keys_N32: np.ndarray) -> None:
        assert bounds_N4.shape == (len(keys_N32), 4) and keys_N32.shape[1] == 32
        self.token_ids_T = token_ids_T
        self.bounds_N4 = bounds_N4
        self.keys_N32 = keys_N32
        prompt_lengths, self.chosen_response_lengths, self.rejected_response_lengths = np.diff(bounds_N4).T
        self.chosen_lengths = prompt_lengths + self.chosen_response_lengths
        self.rejected_lengths = prompt_lengths + self.rejected_response_lengths
        self.num_tokens = self.chosen_lengths + self.rejected_lengths
        self.chosen_response_lengths = bounds_N4[:, 2] - bounds_N4[:, 1]
        self.rejected_response_lengths = bounds_N4[:, 3] - bounds_N4[:, 2]

    def __len__(self) -> int:
        return len(self.bounds_N4)

    def __iter__(self) -> Iterator[PreferenceExample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> PreferenceExample:
        row_id = range(len(self))[index]
        start, prompt_stop, chosen_stop, rejected_stop = self.bounds_N4[row_id].tolist()
        prompt = tuple(self.token_ids_T[start:prompt_stop].tolist())
        return PreferenceExample(
            row_id=row_id,
            key=self.key(row_id),
            chosen=_document(prompt, self.token_ids_T[prompt_stop:chosen_stop]),
            rejected=_document(prompt, self.token_ids_T[chosen_stop:rejected_stop]),
        )

    def key(self, index: int) -> str:
        """Hex hash of the token ids and spans of pair `index`: equal pairs, and only they, share it."""
        return self.keys_N32[index].tobytes().hex()

    @property
    def fingerprint(self) -> str:
        """Hash of all keys in their order."""
        return hashlib.sha256(np.ascontiguousarray(self.keys_N32).data).hexdigest()


def _document(prompt: tuple[int, ...], reply_ids_T: np.ndarray) -> Document:
    token_ids = (*prompt, *reply_ids_T.tolist())
    return Document(token_ids=token_ids, responses=(Span(start=len(prompt), stop=len(token_ids)),))


def load_preference_dataset(
    *,
    mixer_list: Sequence[str],
    splits: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    chat_template_name: str | None,
    max_seq_length: int,
    on_bad_row: Literal["error", "skip"],
    seed: int,
    cache_dir: str | Path | None,
    flag: str = "--mixer_list",
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[PreferenceDataset, DataReport]:
    """The tokenised mixture, from the cache where the same has been asked for before.

    Nothing here speaks of ranks: let one rank call it first, then, past a barrier, the others; they find the
    file. `on_progress(done, total)` counts distinct rows while they are tokenised.

    Raises:
        InputError: see `parse_mixer_list`, `open_rows` and `choose_chat_template`; a row is malformed and
            `on_bad_row` is "error"; or no pair is left.
        RunError: the disk is full.
    """
    if max_seq_length < 2:
        raise InputError(f"--max_seq_length {max_seq_length} leaves no room for a prompt and a reply; use 2 or more.")
    entries = parse_mixer_list(mixer_list, splits, flag=flag)
    chat = ChatFormat(tokenizer, choose_chat_template(tokenizer, chat_template_name))
    sources = [open_rows(entry.name, entry.split, flag=flag) for entry in entries]
    identity = {
        "version": CACHE_VERSION,
        "mixture": [
            (source.fingerprint, source.name, entry.split, repr(entry.amount))
            for source, entry in zip(sources, entries, strict=True)
        ],
        "chat": chat.fingerprint,
        "max_seq_length": max_seq_length,
        "on_bad_row": on_bad_row,
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
    path = cache_root(cache_dir) / "preferences" / f"{digest[:32]}.safetensors"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except DamagedFile as error:
        log.warning("%s; building it again", error)
    builder = PreferenceBuilder(chat, max_seq_length=max_seq_length, on_bad_row=on_bad_row)
    arrays, report = builder.build(entries, sources, seed=seed, on_progress=on_progress)
    write_arrays(path, arrays, {"report": report.to_json()})
    return PreferenceDataset(**arrays), replace(report, cache_file=str(path))


def _read(path: Path) -> tuple[PreferenceDataset, DataReport]:
    arrays, metadata = read_arrays(path)
    try:
        report = DataReport.from_json(metadata["report"])
        return PreferenceDataset(**arrays), replace(report, cache_file=str(path), from_cache=True)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{path} is of another version: {error}") from error
