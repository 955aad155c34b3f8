"""`open-instruct score`: the rows of a file, each with what a reward model says of it.

The model is opened by transformers, as everybody else opens it; rows are read, rendered and tokenised as in training.

Legend: B rows of a batch, T tokens of the longest of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.parser import parse
from open_instruct.config.sections import Dtype, flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.foreign_json import read_object
from open_instruct.data.files.opening import open_rows
from open_instruct.data.files.rows import MalformedRow, RawRow
from open_instruct.data.messages import conversation_of
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.errors import InputError
from open_instruct.run.first_look import local_folder
from open_instruct.wording import counted

if TYPE_CHECKING:
    import torch

ROWS_AT_ONCE = 1024
NORMALIZERS = ("score_mean", "score_std")


@dataclass(kw_only=True)
class ScoreFlags:
    """Write the rows of FILE, {"messages": [...]} or {"prompt": ..., "completion": ...}, each with its 'score' by the
    reward model in the folder MODEL, on the GPU or, where there is none, the CPU.

    Examples:
        open-instruct score runs/rm/hf_model chats.jsonl --output scored.jsonl --normalize
    """

    output: str = flag("file (.jsonl) to write: every row as it was, in its order, with its 'score'")
    normalize: bool = flag("(score - score_mean) / score_std, which config.json has of held-out rows", False)
    max_seq_length: int | None = flag(
        "tokens; longer rows are cut on the right, and get 'truncated'; default: what the model takes", None, minimum=2
    )
    batch_tokens: int = flag("tokens that are computed at once, with padding", 16384, minimum=1)
    chat_template_name: str | None = flag("a built-in template, or a Jinja file; default: the model's own", None)
    param_dtype: Dtype | None = flag("dtype of the computation; default: bfloat16 on CUDA, float32 on a CPU", None)


def main(words: Sequence[str]) -> int:
    """:raises InputError: a folder, a file or a row cannot be used."""
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise InputError(
            "the first words are a model and a file: open-instruct score MODEL FILE --output scored.jsonl",
            kind="stray_word",
        )
    flags = parse(ScoreFlags, words[2:])
    refuse(limit_problems(flags))
    folder, out = local_folder(words[0]), Path(flags.output).expanduser()
    if out.exists() and Path(words[1]).exists() and out.samefile(words[1]):
        raise InputError(f"--output {out} is the file that is scored; name another", kind="conflict", flag="output")
    source = open_rows(words[1], flag="FILE")
    model = RewardScorer.open(folder, flags)
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in scored_rows(source.rows(range(len(source))), model, flags):
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        os.replace(partial, out)
    except OSError as error:
        raise InputError(
            f"--output {out} cannot be written ({error.strerror}); name a file in a folder that exists",
            kind="unreadable_file",
            flag="output",
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()
    print(f"scored {counted(len(source), 'row')} of {words[1]}: {out}")
    return 0


def scored_rows(rows: Iterator[RawRow], model: RewardScorer, flags: ScoreFlags) -> Iterator[dict[str, Any]]:
    """The rows in their order, with their scores.

    :raises InputError: a row is malformed; with file, line and reason.
    """
    while some := list(islice(rows, ROWS_AT_ONCE)):
        token_ids = [model.tokenize(row) for row in some]
        scores = model.scores([ids[: model.max_seq_length] for ids in token_ids], batch_tokens=flags.batch_tokens)
        for row, ids, score in zip(some, token_ids, scores, strict=True):
            was_cut = len(ids) > model.max_seq_length
            yield row.value | {"score": score} | ({"truncated": True} if was_cut else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScorer:
    """An exported reward model on one device, and the numbers that its scores are normalised with."""

    model: Any
    chat: ChatFormat
    max_seq_length: int
    mean: float
    std: float

    @classmethod
    def open(cls, folder: Path, flags: ScoreFlags) -> RewardScorer:
        """:raises InputError: the folder is damaged, its model does not score, or it has nothing to normalise with."""
        config = read_object(folder / "config.json")
        names = [str(name) for name in config.get("architectures") or ()]
        if not any(name.endswith("ForSequenceClassification") for name in names) or config.get("num_labels", 1) != 1:
            raise InputError(
                f"{folder} is no reward model (config.json has the architectures {', '.join(names) or 'none'}): give "
                "the hf_model of a run of open-instruct reward_model",
                kind="unsupported_model",
            )
        if flags.normalize and not set(NORMALIZERS) <= config.keys():
            raise InputError(
                f"--normalize: {folder / 'config.json'} has no {' and '.join(NORMALIZERS)}, which a run with "
                "--eval_mixer_list writes; leave the flag out",
                kind="conflict",
            )
        chat = ChatFormat.choose(load_tokenizer(str(folder), flag="MODEL"), flags.chat_template_name)

        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, flags.param_dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        kind: Any = AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, use_safetensors=True, dtype=dtype).eval().to(device)
        longest = getattr(model.config, "max_position_embeddings", None) or 2**31
        return cls(
            model=model,
            chat=chat,
            max_seq_length=min(flags.max_seq_length or longest, longest),
            mean=float(config["score_mean"]) if flags.normalize else 0.0,
            std=float(config["score_std"]) if flags.normalize else 1.0,
        )

    def tokenize(self, row: RawRow) -> list[int]:
        """The ids of a row's conversation, prompt and reply tokenised apart, as in training.

        :raises InputError: the row is malformed.
        """
        try:
            *prompt, reply = conversation_of(row.content())
            prompt_text, (reply_text,) = self.chat.render(prompt, [reply])
        except MalformedRow as error:
            raise InputError(f"{row}: {error.reason}. Mend this row", kind="bad_row") from None
        first, second = self.chat.tokenize([prompt_text, reply_text])
        return first + second

    def scores(self, token_ids: Sequence[Sequence[int]], *, batch_tokens: int) -> list[float]:
        """A score for each row of ids; rows of like length are padded to one another."""
        import torch

        order = sorted(range(len(token_ids)), key=lambda row: len(token_ids[row]))
        scores = [0.0] * len(token_ids)
        for batch in _batches(order, [len(ids) for ids in token_ids], batch_tokens):
            with torch.no_grad():
                values_B = self._read_ends([token_ids[row] for row in batch])
            for row, value in zip(batch, values_B.tolist(), strict=True):
                scores[row] = (value - self.mean) / self.std
        return scores

    def _read_ends(self, token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """The score at the last token of each row, (B,).

        The body is asked for hidden states, and the head is applied to the last of each row. transformers would look
        for the last token that is not a pad token, which a row that was cut may end in.
        """
        import torch

        lengths_B = torch.tensor([len(ids) for ids in token_ids])
        longest = int(lengths_B.max())
        input_ids_BT = torch.zeros(len(token_ids), longest, dtype=torch.long)
        for row, ids in enumerate(token_ids):
            input_ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT = (torch.arange(longest) < lengths_B[:, None]).long()
        device = self.model.device
        body = self.model.base_model(input_ids=input_ids_BT.to(device), attention_mask=mask_BT.to(device))
        last_BD = body.last_hidden_state[torch.arange(len(token_ids), device=device), (lengths_B - 1).to(device)]
        values_B: torch.Tensor = self.model.score(last_BD)[:, 0].float().cpu()
        return values_B


def _batches(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows in an ascending `order` of lengths, as many together as `batch_tokens` hold with padding; at least one.

    Example: rows of 2, 3 and 9 tokens, 8 tokens at once: the first two, then the third.
    """
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
