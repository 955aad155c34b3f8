"""Scores the rows of a file with an exported reward model: a row out for each row in, in their order.

open-instruct score runs/rm/hf_model chats.jsonl --output scored.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import BadRow, MalformedRow
from open_instruct.data.messages import conversation_of
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.entry import leave, run_to_exit_code
from open_instruct.errors import InputError
from open_instruct.records import Document, Span
from open_instruct.wording import counted

if TYPE_CHECKING:
    from open_instruct.learner.scoring_model import ScoringModel

PROGRAM = "open-instruct score"
ROWS_AT_ONCE = 1024


@dataclass(kw_only=True)
class ScoreSection:
    """Scoring"""

    output: str = flag("file (.jsonl) to write: every row as it was, with its 'score'")
    normalize: bool = flag("(score - score_mean) / score_std, of held-out rows, as config.json has them", False)
    max_seq_length: int | None = flag(
        "tokens; longer rows are cut on the right, and get 'truncated'; default: the model's longest row",
        None,
        minimum=2,
    )
    batch_tokens: int = flag("tokens that are computed at once", 16384, minimum=1)
    chat_template_name: str | None = flag("a built-in template, or a Jinja file; default: the model's own", None)
    param_dtype: Literal["bfloat16", "float32"] | None = flag(
        "dtype of the computation; default: bfloat16 on CUDA, float32 on a CPU", None
    )


@dataclass(kw_only=True)
class ScoreFlags:
    """Score the rows of FILE, {"messages": [...]} or {"prompt": [...], "completion": [...]}, with the reward model in
    the folder MODEL, on one device: `open-instruct score MODEL FILE --output OUT`.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct score runs/rm/hf_model chats.jsonl --output scored.jsonl --normalize",
    )

    score: ScoreSection


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the words in `argv` (default: the command line) and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if asks_for_help(words):
        print_help(ScoreFlags, f"{PROGRAM} MODEL FILE")
        return 0
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise InputError(f"the first words are a model and a file: {PROGRAM} MODEL FILE --output scored.jsonl")
    flags = parse(ScoreFlags, words[2:]).score
    refuse(limit_problems(flags))
    if not (folder := Path(words[0])).is_dir():
        raise InputError(f"MODEL: {folder}: no such folder; give the hf_model that a run has left")
    out = Path(flags.output)
    if out.exists() and Path(words[1]).exists() and out.samefile(words[1]):
        raise InputError(f"--output {out} is the file that is scored; name another")
    source = open_rows(words[1], flag="FILE")

    from open_instruct.learner.scoring_model import ScoringModel

    tokenizer = load_tokenizer(words[0], flag="MODEL")
    model = ScoringModel.open(folder, dtype=flags.param_dtype, normalize=flags.normalize)
    chat = ChatFormat.choose(tokenizer, flags.chat_template_name)
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in scored_rows(source.rows(range(len(source))), chat, model, flags):
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        os.replace(partial, out)
    except OSError as error:
        raise InputError(f"--output {out}: cannot be written ({error.strerror}); choose another file") from error
    finally:
        partial.unlink(missing_ok=True)
    print(f"scored {counted(len(source), 'row')} of {words[1]}: {out}")
    return 0


def scored_rows(
    rows: Iterator[Any], chat: ChatFormat, model: ScoringModel, flags: ScoreSection
) -> Iterator[dict[str, Any]]:
    """The rows with their scores.

    Raises:
        InputError: a row is malformed; with file, line and reason.
    """
    longest = min(flags.max_seq_length or model.max_seq_length, model.max_seq_length)
    while some := list(islice(rows, ROWS_AT_ONCE)):
        documents, is_cut = zip(*(document_of(row, chat, longest) for row in some), strict=True)
        scores = model.scores(documents, batch_tokens=flags.batch_tokens)
        for row, score, was_cut in zip(some, scores, is_cut, strict=True):
            yield row.value | {"score": score} | ({"truncated": True} if was_cut else {})


def document_of(row: Any, chat: ChatFormat, longest: int) -> tuple[Document, bool]:
    """The conversation of a row, read at its last token, and whether it had to be cut."""
    if isinstance(row, BadRow):
        raise InputError(f"{row}. Mend this row")
    try:
        token_ids = chat.encode(conversation_of(row.value)).token_ids
    except MalformedRow as error:
        raise InputError(str(error.at(row.file, row.line))) from None
    place = Span(start=1, stop=min(len(token_ids), longest))
    return Document(token_ids=token_ids[:longest], responses=(place,), reads_ends=True), len(token_ids) > longest


if __name__ == "__main__":
    leave(run_to_exit_code(main, program=PROGRAM))
