"""Prompts, tokenised once and kept as flat arrays.

Legend for array names: N prompts of the data set, T tokens, C bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from open_instruct.data.cache import DamagedFile, cache_root, read_arrays, write_arrays
from open_instruct.data.chat import ChatFormat, choose_chat_template
from open_instruct.data.mixer import MixerEntry, parse_mixer_list, select_rows
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.report import BadRowLog, DataReport
from open_instruct.data.rows import BadRow, MalformedRow, RawRow, RowSource, open_rows
from open_instruct.errors import InputError
from open_instruct.records import Check, Prompt
from open_instruct.verifiers.verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

# Part of the cache key: raise it when the code makes other arrays of the same rows.
CACHE_VERSION = 1
_ROWS_AT_ONCE = 512


class PromptDataset:
    """Tokenised prompts in mixture order, as arrays that can be mapped from a file.

    Attributes:
        token_ids_T: int32; each distinct prompt as an engine is given it, up to where the reply starts.
        details_C: uint8; of each distinct prompt, its text and its checks as JSON.
        bounds_N4: int64; where prompt n starts and stops in `token_ids_T`, and in `details_C`. Repeated rows share
            both.
        num_tokens: int64 (N,); tokens of each prompt.
    """

    def __init__(self, *, token_ids_T: np.ndarray, details_C: np.ndarray, bounds_N4: np.ndarray) -> None:
        assert bounds_N4.ndim == 2 and bounds_N4.shape[1] == 4
        self.token_ids_T = token_ids_T
        self.details_C = details_C
        self.bounds_N4 = bounds_N4
        self.num_tokens = bounds_N4[:, 1] - bounds_N4[:, 0]

    def __len__(self) -> int:
        return len(self.bounds_N4)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Prompt:
        row_id = range(len(self))[index]
        start, stop, details_start, details_stop = self.bounds_N4[row_id].tolist()
        details = json.loads(self.details_C[details_start:details_stop].tobytes())
        return Prompt(
            row_id=row_id,
            token_ids=tuple(self.token_ids_T[start:stop].tolist()),
            text=details["text"],
            checks=tuple(Check(**check) for check in details["checks"]),
        )

    @property
    def fingerprint(self) -> str:
        """Hash of all prompts with their checks, in their order."""
        digest = hashlib.sha256()
        for array_ in (self.token_ids_T, self.details_C, self.bounds_N4):
            digest.update(np.ascontiguousarray(array_).data)
        return digest.hexdigest()


def load_prompt_dataset(
    *,
    mixer_list: Sequence[str],
    splits: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    chat_template_name: str | None,
    max_prompt_token_length: int,
    on_bad_row: Literal["error", "skip"],
    seed: int,
    cache_dir: str | Path | None,
    flag: str = "--dataset_mixer_list",
    known_verifiers: Mapping[str, Verifier] | None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[PromptDataset, DataReport]:
    """The tokenised mixture, from the cache where the same has been asked for before.

    `on_progress(done, total)` counts distinct rows while they are tokenised.

    Raises:
        InputError: see `parse_mixer_list`, `open_rows` and `choose_chat_template`; a row is malformed, or names a
            verifier that is not among `known_verifiers` or that refuses its ground truth, and `on_bad_row` is
            "error"; or no prompt is left.
        RunError: the disk is full.
    """
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
        "max_prompt_token_length": max_prompt_token_length,
        "on_bad_row": on_bad_row,
        "seed": seed,
        "known_verifiers": None if known_verifiers is None else sorted(known_verifiers),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
    path = cache_root(cache_dir) / "prompts" / f"{digest[:32]}.safetensors"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except DamagedFile as error:
        log.warning("%s; building it again", error)
    builder = _PromptBuilder(
        chat,
        max_prompt_token_length=max_prompt_token_length,
        on_bad_row=on_bad_row,
        known_verifiers=known_verifiers,
    )
    arrays, report = builder.build(entries, sources, seed=seed, on_progress=on_progress)
    write_arrays(path, arrays, {"report": report.to_json()})
    return PromptDataset(**arrays), replace(report, cache_file=str(path))


def _read(path: Path) -> tuple[PromptDataset, DataReport]:
    arrays, metadata = read_arrays(path)
    try:
        report = DataReport.from_json(metadata["report"])
        return PromptDataset(**arrays), replace(report, cache_file=str(path), from_cache=True)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{path} is of another version: {error}") from error


class _PromptBuilder:
    """Gathers the distinct prompts of all sources, then repeats them as the mixture says."""

    def __init__(
        self,
        chat: ChatFormat,
        *,
        max_prompt_token_length: int,
        on_bad_row: str,
        known_verifiers: Mapping[str, Verifier] | None,
    ) -> None:
        self.chat = chat
        self.max_prompt_token_length = max_prompt_token_length
        self.on_bad_row = on_bad_row
        self.known_verifiers = known_verifiers
        self.token_ids = array("i")
        self.details = bytearray()
        self.bounds: list[tuple[int, int, int, int]] = []
        self.bad = BadRowLog()
        self.filtered: Counter[str] = Counter()
        self.shortest: int | None = None

    def build(
        self,
        entries: Sequence[MixerEntry],
        sources: Sequence[RowSource],
        *,
        seed: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[dict[str, np.ndarray], DataReport]:
        """All sources in turn, into the arrays that `PromptDataset` is made of.

        Raises:
            InputError: a row is malformed and `on_bad_row` is "error", or no prompt is left.
        """
        selected = [select_rows(entry, len(source), seed) for entry, source in zip(entries, sources, strict=True)]
        distinct = [np.unique(indices) for indices in selected]
        num_rows = sum(map(len, distinct))
        prompt_of_N: list[np.ndarray] = []
        num_done = 0
        for source, indices, rows in zip(sources, selected, distinct, strict=True):
            prompt_of_row = np.full(len(rows), -1, dtype=np.int64)
            stream = enumerate(source.rows(rows.tolist()))
            while chunk := list(islice(stream, _ROWS_AT_ONCE)):
                for index, prompt in self._add(chunk):
                    prompt_of_row[index] = prompt
                num_done += len(chunk)
                if on_progress is not None:
                    on_progress(num_done, num_rows)
            prompts = prompt_of_row[np.searchsorted(rows, indices)]
            prompt_of_N.append(prompts[prompts >= 0])
        if self.bad.counts and self.on_bad_row == "error":
            raise self.bad.error(num_rows)
        if not self.bounds:
            raise self._nothing_left(num_rows)

        order_N = np.concatenate(prompt_of_N)
        bounds_N4 = np.array(self.bounds, dtype=np.int64)[order_N]
        arrays = {
            "token_ids_T": np.frombuffer(self.token_ids, dtype=np.int32),
            "details_C": np.frombuffer(bytes(self.details), dtype=np.uint8),
            "bounds_N4": bounds_N4,
        }
        return arrays, DataReport(
            sources=tuple(
                (source.name, len(source), len(indices)) for source, indices in zip(sources, selected, strict=True)
            ),
            num_rows=num_rows,
            bad=dict(self.bad.counts),
            bad_rows=tuple(map(str, self.bad.first)),
            filtered=dict(self.filtered),
            num_truncated=0,
            num_kept=len(self.bounds),
            num_pairs=len(order_N),
            num_tokens=int((bounds_N4[:, 1] - bounds_N4[:, 0]).sum()),
            warnings=tuple(entry.warning for entry in entries if entry.warning),
            unit="prompt",
        )

    def _add(self, rows: Sequence[tuple[int, RawRow | BadRow]]) -> Iterator[tuple[int, int]]:
        """Takes rows in; yields (index of the row, index of its prompt) of those that stay."""
        rendered = [(index, *result) for index, row in rows if (result := self._render(row)) is not None]
        if not rendered or (self.bad.counts and self.on_bad_row == "error"):
            return  # after a bad row the rest is read only to say how many there are
        ids = self.chat.tokenize([text for _, text, _ in rendered])
        for (index, text, checks), token_ids in zip(rendered, ids, strict=True):
            self.shortest = min(len(token_ids), self.shortest or len(token_ids))
            if len(token_ids) > self.max_prompt_token_length:
                self.filtered["long_prompt"] += 1
                continue
            start, details_start = len(self.token_ids), len(self.details)
            self.token_ids.extend(token_ids)
            self.details += json.dumps({"text": text, "checks": list(map(asdict, checks))}).encode()
            self.bounds.append((start, len(self.token_ids), details_start, len(self.details)))
            yield index, len(self.bounds) - 1

    def _render(self, row: RawRow | BadRow) -> tuple[str, tuple[Check, ...]] | None:
        """The text of a row's prompt and how its answers are judged; None for a bad row, which is noted."""
        if isinstance(row, RawRow):
            try:
                parsed = parse_prompt_row(row.value, self.known_verifiers)
                return self.chat.render(parsed.messages, ())[0], parsed.checks
            except MalformedRow as error:
                row = BadRow(file=row.file, line=row.line, kind=error.kind, reason=error.reason)
        self.bad.add(row)
        return None

    def _nothing_left(self, num_rows: int) -> InputError:
        if not self.filtered:
            return self.bad.error(num_rows)
        counts = ", ".join(f"{kind} {count:,}" for kind, count in (self.filtered + self.bad.counts).items())
        return InputError(
            f"no prompt of {num_rows:,} rows is left at --max_prompt_token_length {self.max_prompt_token_length} "
            f"({counts}); raise it: the shortest prompt has {self.shortest:,} tokens."
        )
