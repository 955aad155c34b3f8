"""`open-instruct score`: scores the rows of a file with a reward or process reward model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from open_instruct.config.parser import parse
from open_instruct.config.sections import Dtype, flag
from open_instruct.config.validation import limit_problems, refuse, template_variable_problems
from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import RawRow
from open_instruct.run.first_look import fetch_folder
from open_instruct.run.scorers import Scorer, open_scorer

ROWS_AT_ONCE = 1024


@dataclass(kw_only=True)
class ScoreFlags:
    """Write the rows of FILE with what the reward model in the folder MODEL says of them, on the
    GPU or, where there is none, the CPU: of {"messages": [...]} or {"prompt": ..., "completion":
    ...} a 'score'; by a process reward model, of {"prompt": ..., "completions": [...]}, or
    {"input": ...} with its placeholder, 'scores', for each step the probability that it is right.

    Examples:
        open-instruct score runs/rm/hf_model chats.jsonl --output scored.jsonl --normalize
        open-instruct score runs/prm/hf_model steps.jsonl --output scored.jsonl
    """

    output: str = flag(
        "file (.jsonl) to write: every row as it was, in its order, with its 'score' or 'scores'"
    )
    normalize: bool = flag(
        "(score - score_mean) / score_std, which config.json has of held-out rows", False
    )
    max_seq_length: int | None = flag(
        "tokens; longer rows are cut on the right (steps that do not fit whole have no score), "
        "and get 'truncated'; default: what the model takes",
        None,
        minimum=2,
    )
    batch_tokens: int = flag("tokens that are computed at once, with padding", 16384, minimum=1)
    chat_template_name: str | None = flag(
        "a built-in template, or a Jinja file; default: the model's own", None
    )
    chat_template_kwargs: list[str] = flag(
        "variables of the chat template, each KEY=VALUE: 'enable_thinking=false'; else as the "
        "template has them",
        [],
    )
    param_dtype: Dtype | None = flag(
        "dtype of the computation; default: bfloat16 on CUDA, float32 on a CPU", None
    )


def main(words: Sequence[str]) -> int:
    """:raises InputError: a folder, a file or a row cannot be used."""
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise InputError(
            "the first words are a model and a file: open-instruct score MODEL FILE --output "
            "scored.jsonl",
            kind="stray_word",
        )
    flags = parse(ScoreFlags, words[2:])
    refuse([*limit_problems(flags), *template_variable_problems(flags.chat_template_kwargs)])
    folder = fetch_folder(words[0])
    out = Path(flags.output).expanduser()
    if out.exists() and Path(words[1]).exists() and out.samefile(words[1]):
        raise InputError(
            f"--output {out} is the file that is scored; name another",
            kind="conflict",
            flag="output",
        )
    source = open_rows(words[1], flag="FILE")
    model = open_scorer(
        folder,
        normalize=flags.normalize,
        max_seq_length=flags.max_seq_length,
        chat_template_name=flags.chat_template_name,
        chat_template_kwargs=flags.chat_template_kwargs,
        dtype=flags.param_dtype,
    )
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in score_rows(source.rows(range(len(source))), model, flags):
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        os.replace(partial, out)
    except OSError as error:
        raise InputError(
            f"--output {out} cannot be written ({error.strerror}); name a file in a folder that "
            "exists",
            kind="unreadable_file",
            flag="output",
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()
    print(f"scored {spell_count(len(source), 'row')} of {words[1]}: {out}")
    return 0


def score_rows(
    rows: Iterator[RawRow], model: Scorer, flags: ScoreFlags
) -> Iterator[dict[str, Any]]:
    """The rows in their order, with their scores.

    :raises InputError: a row is malformed; with file, line and reason.
    """
    while some := list(islice(rows, ROWS_AT_ONCE)):
        tokenized_rows = [model.tokenize(row) for row in some]
        scores = model.score(
            [model.cut(row) for row in tokenized_rows], batch_tokens=flags.batch_tokens
        )
        for row, whole, scores_of_row in zip(some, tokenized_rows, scores, strict=True):
            was_cut = len(whole.token_ids) > model.max_seq_length
            yield (
                row.value | model.columns(scores_of_row) | ({"truncated": True} if was_cut else {})
            )
