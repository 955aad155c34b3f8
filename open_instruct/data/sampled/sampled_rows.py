"""Rows whose replies were sampled, with their exact ids: nothing of them is tokenised again.

`open-instruct serve --record` writes a row for every branch of a session, whose `sampled` is a
`SampledBranch`; `open-instruct sessions` makes pairs of them, whose `sampled` is a `SampledPair`.
Where `messages` were edited, or another tokenizer or template is used, the ids are refused: they
would say something else than the row does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from open_instruct.core.records import Span
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.templates.text_compare import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAMPLED = "sampled"
LEAVE_OUT = f"leave {SAMPLED!r} out of the rows to learn their texts as the template writes them"
UNFINISHED = "\ufffd"  # what part of a character decodes to

Ids = tuple[int, ...]
Record = TypeVar("Record", "SampledBranch", "SampledPair")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBranch:
    """A conversation as it was sampled: a prompt, and behind it replies and what is between them.

    Example: a reply of tokens 0 to 8, then 9 tokens of the user and a reply of 3 have `replies`
    ((0, 9), (18, 21)).
    """

    chat_format: str  # the fingerprint of the tokenizer and the template
    temperature: float
    top_p: float
    prompt_token_ids: Ids
    token_ids: Ids
    replies: tuple[tuple[int, int], ...]
    """Where the replies start and stop in `token_ids`, but for those sampled otherwise."""
    numbers: tuple[int, ...]
    """The number of each in its session; branches that share a reply have it under one number."""
    turns: tuple[int, ...]
    """The place of each among `messages`."""
    logprobs: tuple[float, ...]
    """Of all tokens of `replies`, under the temperature."""
    is_cut: bool  # the last reply, at a limit

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(start=start, stop=stop) for start, stop in self.replies)

    def list_pieces(self) -> list[Ids]:
        """Context and replies in turn, up to the end of the last of `replies`."""
        pieces: list[Ids] = []
        context = self.prompt_token_ids
        end = 0
        for start, stop in self.replies:
            pieces += [context + self.token_ids[end:start], self.token_ids[start:stop]]
            context = ()
            end = stop
        return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPair:
    """Two replies that were sampled behind the same ids."""

    chat_format: str
    prompt_token_ids: Ids
    chosen_token_ids: Ids
    rejected_token_ids: Ids


def read_branch(row: Mapping[str, Any]) -> SampledBranch | None:
    """What was sampled of a conversation; None where the row does not say.

    Raises:
        MalformedRow: it is none of ours.
    """
    branch = _read_record(row, SampledBranch)
    if branch is None:
        return None
    ends = [0]
    for start, stop in branch.replies:
        if not ends[-1] <= start < stop:
            raise MalformedRow(SAMPLED, f"{SAMPLED!r}: a reply is empty, or before another's end")
        ends.append(stop)
    num_sampled = sum(stop - start for start, stop in branch.replies)
    is_whole = (
        ends[-1] <= len(branch.token_ids)
        and len(branch.replies) == len(branch.numbers) == len(branch.turns)
        and len(branch.logprobs) == num_sampled
    )
    if not is_whole or not branch.prompt_token_ids:
        raise MalformedRow(SAMPLED, f"{SAMPLED!r}: its parts are not as long as they should be")
    return branch


def read_pair(row: Mapping[str, Any]) -> SampledPair | None:
    """What was sampled of a pair; None where the row does not say.

    Raises:
        MalformedRow: it is none of ours.
    """
    pair = _read_record(row, SampledPair)
    if pair is None:
        return None
    if not (pair.prompt_token_ids and pair.chosen_token_ids and pair.rejected_token_ids):
        raise MalformedRow(SAMPLED, f"{SAMPLED!r}: its prompt or a reply has no tokens")
    return pair


def write_sampled(record: SampledBranch | SampledPair) -> dict[str, Any]:
    """The value of a row's `sampled`, as JSON."""
    return asdict(record)


def check_branch(
    branch: SampledBranch,
    row: Mapping[str, Any],
    chat_format: str,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Check that the ids are of this tokenizer and template, and say what `messages` say.

    Args:
        chat_format: the fingerprint of the run's tokenizer and template.

    Raises:
        MalformedRow: they do not.
    """
    _check_chat_format(branch.chat_format, chat_format)
    for (start, stop), turn in zip(branch.replies, branch.turns, strict=True):
        _check_reply(row, "messages", turn, branch.token_ids[start:stop], tokenizer)


def check_pair(
    pair: SampledPair, row: Mapping[str, Any], chat_format: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Check that the ids are of this tokenizer and template, and say what the replies say.

    Args:
        chat_format: the fingerprint of the run's tokenizer and template.

    Raises:
        MalformedRow: they do not.
    """
    _check_chat_format(pair.chat_format, chat_format)
    _check_reply(row, "chosen", -1, pair.chosen_token_ids, tokenizer)
    _check_reply(row, "rejected", -1, pair.rejected_token_ids, tokenizer)


def _check_chat_format(chat_format: str, expected: str) -> None:
    """:raises MalformedRow: the ids are of another tokenizer, or of another template."""
    if chat_format != expected:
        raise MalformedRow(
            "other_chat_format",
            f"{SAMPLED!r} has ids of another tokenizer or chat template than this run's: take the "
            f"model that was served, or {LEAVE_OUT}",
        )


def _check_reply(
    row: Mapping[str, Any],
    key: str,
    turn: int,
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Check that the ids of a reply say its text, which may end within the last token.

    Raises:
        MalformedRow: they do not.
    """
    text = None
    with suppress(IndexError, KeyError, TypeError):
        text = row[key][turn]["content"]
    decode = tokenizer.backend_tokenizer.decode
    whole = decode(list(token_ids), skip_special_tokens=False)
    least = decode(list(token_ids[:-1]), skip_special_tokens=False).rstrip(UNFINISHED)
    if not isinstance(text, str) or not whole.startswith(text) or len(text) < len(least):
        raise MalformedRow(
            "edited_reply",
            f"{key!r}: a reply is not what was sampled, {shorten(whole)}: {LEAVE_OUT}",
        )


def _read_record(row: Mapping[str, Any], record_class: type[Record]) -> Record | None:
    value = row.get(SAMPLED)
    if value is None:
        return None
    problem = f"{SAMPLED!r} is not what `open-instruct serve --record` or `sessions` writes"
    if not isinstance(value, Mapping):
        raise MalformedRow(SAMPLED, problem)
    fields = {name: _freeze(each) for name, each in value.items()}
    try:
        record = record_class(**fields)
    except TypeError as error:
        raise MalformedRow(SAMPLED, f"{problem}: {error}") from error
    for name, annotation in get_type_hints(record_class).items():
        if not _fits(fields[name], annotation):
            raise MalformedRow(SAMPLED, f"{problem}: {name}")
    return record


def _freeze(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    return value


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value is what a field of ours holds."""
    if annotation in (str, bool):
        return isinstance(value, annotation)
    if annotation is float:
        return _is_number(value)
    if not isinstance(value, tuple):
        return False
    if annotation == tuple[float, ...]:
        return all(map(_is_number, value))
    if annotation == tuple[tuple[int, int], ...]:
        return all(
            isinstance(each, tuple) and len(each) == 2 and _fits(each, Ids) for each in value
        )
    return all(type(each) is int and each >= 0 for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
