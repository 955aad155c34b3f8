"""Scores rows with an exported reward model, or process reward model, opened by transformers.

Rows are rendered and tokenised as in training. The body computes hidden states, and the head is
applied where a row is read. transformers itself would read the last token that is not a pad token,
and the text of a row that was cut may end in pad tokens.

Legend: B rows of a batch, T tokens of the longest of them, N places that are read, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.row_forms import find_conversation
from open_instruct.data.files.foreign_json import read_object
from open_instruct.data.files.rows import MalformedRow, RawRow
from open_instruct.data.step_rows import PlaceholderBuilder, StepBuilder
from open_instruct.data.tokenizer import find_token_id, load_tokenizer
from open_instruct.models.hf.head_kinds import CLASS_ENDINGS
from open_instruct.rewards.reward_models import write_step_lines
from open_instruct.run.transformers_model import open_model

if TYPE_CHECKING:
    import torch

NORMALIZERS = ("score_mean", "score_std")
SEPARATOR = "prm_step_separator"
PLACEHOLDER = "prm_placeholder_token"
REWARD_TOKENS = "prm_reward_tokens"
ADD_BOS = "prm_add_bos"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRow:
    """The ids of a row, and the numbers of the tokens at which it is read.

    Example: of a prompt of three tokens and two steps of two each, `TokenizedRow(token_ids=ids,
    ends=(4, 6))`.
    """

    token_ids: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """A model on one device that scores rows; a subclass reads its kind of row and head."""

    model: Any
    chat: ChatFormat
    max_seq_length: int

    @abstractmethod
    def tokenize(self, row: RawRow) -> TokenizedRow:
        """:raises InputError: the row is malformed."""

    @abstractmethod
    def read_head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The score at each place, (N,)."""

    @abstractmethod
    def columns(self, scores: Sequence[float]) -> dict[str, Any]:
        """The columns that the scores at a row's places become."""

    @abstractmethod
    def cut(self, row: TokenizedRow) -> TokenizedRow:
        """The part of a row that fits into `max_seq_length`."""

    def score(self, rows: Sequence[TokenizedRow], *, batch_tokens: int) -> list[list[float]]:
        """The scores of each row; rows of like length are padded to one another."""
        import torch

        order = sorted(range(len(rows)), key=lambda row: len(rows[row].token_ids))
        order = [row for row in order if rows[row].ends]
        scores: list[list[float]] = [[] for _ in rows]
        for batch in _batches(order, [len(row.token_ids) for row in rows], batch_tokens):
            with torch.no_grad():
                hidden_ND = self._hidden_at_ends([rows[row] for row in batch])
                values_N = self.read_head(hidden_ND).float().cpu()
            counts = [len(rows[row].ends) for row in batch]
            for row, values in zip(batch, values_N.split(counts), strict=True):
                scores[row] = values.tolist()
        return scores

    def _hidden_at_ends(self, rows: Sequence[TokenizedRow]) -> torch.Tensor:
        """The hidden states where the rows are read, one row behind the other: (N, D)."""
        import torch

        lengths_B = torch.tensor([len(row.token_ids) for row in rows])
        longest = int(lengths_B.max())
        input_ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            input_ids_BT[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
        mask_BT = (torch.arange(longest) < lengths_B[:, None]).long()
        device = self.model.device
        body = self.model.base_model(
            input_ids=input_ids_BT.to(device), attention_mask=mask_BT.to(device)
        )
        counts_B = torch.tensor([len(row.ends) for row in rows], device=device)
        rows_N = torch.arange(len(rows), device=device).repeat_interleave(counts_B)
        ends = list(chain.from_iterable(row.ends for row in rows))
        ends_N = torch.tensor(ends, device=device)
        hidden_ND: torch.Tensor = body.last_hidden_state[rows_N, ends_N]
        return hidden_ND


@dataclass(frozen=True, kw_only=True)
class RewardScorer(Scorer):
    """A reward model, and the numbers that its scores are normalised with."""

    mean: float
    std: float

    def tokenize(self, row: RawRow) -> TokenizedRow:
        """Prompt and reply are tokenised apart."""
        try:
            *prompt, reply = find_conversation(row.content())
            prompt_text, (reply_text,) = self.chat.render(prompt, [reply])
        except MalformedRow as error:
            raise InputError(f"{row}: {error.reason}. Mend this row", kind="bad_row") from None
        first, second = self.chat.tokenize([prompt_text, reply_text])
        return _read_at_last(first + second)

    def read_head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        values_N: torch.Tensor = (self.model.score(hidden_ND)[:, 0].float() - self.mean) / self.std
        return values_N

    def columns(self, scores: Sequence[float]) -> dict[str, Any]:
        return {"score": scores[0]}

    def cut(self, row: TokenizedRow) -> TokenizedRow:
        return _read_at_last(row.token_ids[: self.max_seq_length])


@dataclass(frozen=True, kw_only=True)
class StepScorer(Scorer):
    """A process reward model, with its config.json's fields and the builders of its rows."""

    fields: Mapping[str, Any]
    lists: StepBuilder
    texts: PlaceholderBuilder | None  # where a placeholder ends a step
    # The reward tokens, that of a right step first; none with a head of two classes.
    word_ids: Sequence[int]

    def tokenize(self, row: RawRow) -> TokenizedRow:
        """Tokenise texts, steps and step ends apart; a row is scored where a step ends."""
        try:
            pieces = self.chat.tokenize(self._pieces(row.content()))
        except MalformedRow as error:
            raise InputError(f"{row}: {error.reason}. Mend this row", kind="bad_row") from None
        ends = list(accumulate(map(len, pieces), initial=-1))[3::2]
        return TokenizedRow(token_ids=list(chain.from_iterable(pieces)), ends=ends)

    def _pieces(self, content: Mapping[str, Any]) -> list[str]:
        """:raises MalformedRow: the row has no steps that this model reads."""
        if self.texts is not None and "completions" not in content:
            return list(self.texts.find_texts(content))
        if self.texts is not None:
            return write_step_lines(
                self.lists.find_prompt(content),
                self.lists.find_steps(content),
                separator=self.fields[SEPARATOR],
                placeholder=self.texts.step_end,
                bos=self.texts.bos,
            )
        if "completions" not in content and "input" in content:
            raise MalformedRow(
                "missing_key",
                "no key 'completions': the model was trained without a placeholder, on lists of "
                "steps",
            )
        return list(self.lists.find_texts(content))

    def read_head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The probability that the step is right."""
        if self.word_ids:
            logits_NC = self.model.get_output_embeddings()(hidden_ND)[:, list(self.word_ids)]
            right_N: torch.Tensor = logits_NC.float().softmax(dim=1)[:, 0]
        else:
            right_N = self.model.score(hidden_ND).float().softmax(dim=1)[:, 1]
        return right_N

    def columns(self, scores: Sequence[float]) -> dict[str, Any]:
        return {"scores": list(scores)}

    def cut(self, row: TokenizedRow) -> TokenizedRow:
        """Steps that do not fit whole have no score."""
        ends = [end for end in row.ends if end < self.max_seq_length]
        return TokenizedRow(token_ids=row.token_ids[: self.max_seq_length], ends=ends)


def open_scorer(
    folder: Path,
    *,
    normalize: bool,
    max_seq_length: int | None,
    chat_template_name: str | None,
    chat_template_kwargs: Sequence[str],
    dtype: str | None,
) -> Scorer:
    """Open the model in a folder, on the GPU or, without one, on the CPU.

    :raises InputError: the folder is damaged, its model does not score, or it has nothing to
        normalise with.
    """
    config = read_object(folder / "config.json")
    is_of_steps = SEPARATOR in config
    class_name = _find_class(folder, config, is_of_steps=is_of_steps)
    if normalize and not set(NORMALIZERS) <= config.keys():
        raise InputError(
            f"--normalize: {folder / 'config.json'} has no {' and '.join(NORMALIZERS)}, which a "
            "reward_model with --eval_mixer_list writes; leave the flag out",
            kind="conflict",
        )
    tokenizer = load_tokenizer(str(folder), flag="MODEL")
    chat = ChatFormat.choose(tokenizer, chat_template_name, variables=chat_template_kwargs)
    model = open_model(folder, class_name, dtype)
    longest = getattr(model.config, "max_position_embeddings", None) or 2**31
    common: Any = {
        "model": model,
        "chat": chat,
        "max_seq_length": min(max_seq_length or longest, longest),
    }
    if is_of_steps:
        reward_tokens = config.get(REWARD_TOKENS) or ()
        word_ids = [find_token_id(tokenizer, word) for word in reward_tokens]
        return _build_step_scorer(config, word_ids, common)
    mean = 0.0
    std = 1.0
    if normalize:
        mean = float(config["score_mean"])
        std = float(config["score_std"])
    return RewardScorer(mean=mean, std=std, **common)


def _build_step_scorer(
    config: Mapping[str, Any], word_ids: Sequence[int], common: Mapping[str, Any]
) -> StepScorer:
    rows: Any = {
        "chat": common["chat"],
        "classes": (),
        "right": 1,
        "max_seq_length": 2,
        "on_bad_row": "error",
    }
    texts = None
    placeholder = config.get(PLACEHOLDER)
    if placeholder is not None:
        add_bos = bool(config.get(ADD_BOS))
        texts = PlaceholderBuilder(step_end=placeholder, add_bos=add_bos, **rows)
    lists = StepBuilder(step_end=config[SEPARATOR], **rows)
    return StepScorer(
        fields=config,
        lists=lists,
        texts=texts,
        word_ids=word_ids,
        **common,
    )


def _find_class(folder: Path, config: Mapping[str, Any], *, is_of_steps: bool) -> str:
    """The class of transformers that opens the folder.

    :raises InputError: it names a model that does not score.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    num_labels = config.get("num_labels") or len(config.get("id2label") or "0")
    if is_of_steps and config.get(REWARD_TOKENS):
        return "AutoModelForCausalLM"
    head, num_wanted = ("classes", 2) if is_of_steps else ("score", 1)
    ending = CLASS_ENDINGS[head]  # type: ignore[index]
    if not any(name.endswith(ending) for name in names) or num_labels != num_wanted:
        raise InputError(
            f"{folder} is no reward model (config.json has the architectures "
            f"{', '.join(names) or 'none'}): give the hf_model of a run of open-instruct "
            "reward_model or prm",
            kind="unsupported_model",
        )
    return f"AutoModel{ending}"


def _read_at_last(token_ids: Sequence[int]) -> TokenizedRow:
    return TokenizedRow(token_ids=token_ids, ends=(len(token_ids) - 1,))


def _batches(
    order: Sequence[int], lengths: Sequence[int], batch_tokens: int
) -> Iterator[list[int]]:
    """Rows in an ascending `order` of lengths, in batches of at most `batch_tokens` with padding.

    A longer row is a batch of its own.

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
