"""Rows of process rewards: solutions whose steps are labelled, and read where each step ends.

A row is a prompt and a list of steps, behind each of which a separator is written (as TRL's
stepwise supervision has it), or one text in which a placeholder token ends every step (as
OpenRLHF's). Texts, steps and what ends them are tokenised apart, so what ends a step is always its
own tokens, and the last of these is where the model is read.

A label is the number of a class. Between two classes it may also be a fraction: 0.25 is a quarter
of class 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from open_instruct.core.errors import InputError
from open_instruct.core.text import join_choices, spell_count
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.messages import parse_conversation
from open_instruct.data.conversations.rendered_row import RenderedRow
from open_instruct.data.conversations.row_keys import describe_keys, missing_key_error
from open_instruct.data.files.rows import MalformedRow, name_json_type
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.tokenizer import find_token_id

# The keys of a row's labels; of several that a row has, the first is read.
LABEL_KEYS = ("labels", "values", "value", "label")
BYTES_OF_LABEL = 4  # a float32
STEPS_IN_PLANS = 16  # of a solution, where a plan has to assume a number


class StepBuilder(RowBuilder):
    """Builds rows `{"prompt": text, "completions": [a step, a step], "labels": [true, false]}`.

    The prompt may also be messages.
    """

    unit = "solution"
    row_example = '{"prompt": "text", "completions": ["a step", "a step"], "labels": [true, false]}'
    columns: ClassVar[tuple[str, ...]] = ("prompt", "completions", "labels")
    docs_page = "docs/prm.md"
    reads_ends = True
    ends_per_document = STEPS_IN_PLANS

    def __init__(
        self,
        chat: ChatFormat,
        *,
        step_end: str,
        classes: Sequence[str],
        right: int,
        **common: Any,
    ) -> None:
        """
        Args:
            chat: what makes token ids of texts.
            step_end: the text behind each step.
            classes: words for the classes, in their order.
            right: the number of the class of a right step.
            common: arguments of `RowBuilder`.
        """
        super().__init__(chat, **common)
        self.step_end = step_end
        self.classes = classes
        self.right = right
        self.num_steps_cut = 0
        if not chat.tokenize([step_end])[0]:
            raise InputError(
                f"--step_separator {step_end!r}: the tokenizer makes no token of it; choose "
                "another",
                kind="bad_value",
            )

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        labels = self.find_labels(row, self.find_steps(row))
        values = [self.parse_label(label, number) for number, label in enumerate(labels, start=1)]
        return RenderedRow(texts=self.find_texts(row), values=tuple(values))

    def find_texts(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The text before the first step, then each step and what ends it.

        Raises:
            MalformedRow: there are none.
        """
        steps = self.find_steps(row)
        texts = [self.find_prompt(row)]
        for step in steps:
            texts += [step, self.step_end]
        return tuple(texts)

    def find_prompt(self, row: Mapping[str, Any]) -> str:
        """The text before the first step.

        Messages are rendered; a text stays as it is, behind the bos token if there is one.
        """
        if "prompt" not in row:
            raise missing_key_error(row, "prompt")
        prompt: Any = row["prompt"]
        if isinstance(prompt, list):
            text, _ = self.chat.render(parse_conversation(row, "prompt", last_role="user"), ())
            return text
        if not isinstance(prompt, str) or not prompt:
            raise MalformedRow(
                "bad_prompt",
                f"'prompt' must be a text or messages, not {name_json_type(prompt)} or empty",
            )
        _check_unicode(prompt, "'prompt'")
        bos: str = self.chat.tokenizer.bos_token or ""
        return prompt if prompt.startswith(bos) else bos + prompt

    def find_steps(self, row: Mapping[str, Any]) -> list[str]:
        """The text of each step, without what ends it.

        Raises:
            MalformedRow: there are none, or one is no text or empty.
        """
        if "completions" not in row:
            hint = ""
            if "input" in row:
                hint = "; with --placeholder_token a row is one text, 'input'"
            raise missing_key_error(row, "completions", hint)
        return _check_steps(row["completions"], "completions")

    def find_labels(self, row: Mapping[str, Any], steps: Sequence[str]) -> list[Any]:
        """The label of each step, unchecked.

        Raises:
            MalformedRow: there are none, or more or fewer than steps.
        """
        key = next((each for each in LABEL_KEYS if each in row), None)
        if key is None:
            raise MalformedRow(
                "no_labels", f"no labels of its steps ('labels'); the row has {describe_keys(row)}"
            )
        labels = self.split_labels(row[key], steps)
        if not isinstance(labels, list):
            raise MalformedRow(
                "no_labels",
                f"{key!r} must be a list with a label for each step, not {name_json_type(labels)}",
            )
        if len(labels) != len(steps):
            reason = (
                f"{key!r} has {spell_count(len(labels), 'label')} for "
                f"{spell_count(len(steps), 'step')}"
            )
            raise MalformedRow("label_count", reason)
        return labels

    def split_labels(self, labels: Any, steps: Sequence[str]) -> Any:
        """The labels as a list, if they are written as something else; here they never are."""
        return labels

    def parse_label(self, label: Any, number: int) -> float:
        """The class of step `number`, counted from 1.

        Raises:
            MalformedRow: the label names no class.
        """
        if isinstance(label, str) and label.strip() in self.classes:
            return float(self.classes.index(label.strip()))
        is_share = isinstance(label, bool | int | float) and 0 <= label <= 1
        has_two_classes = len(self.classes) <= 2
        if not is_share or not has_two_classes:
            numbers = "true, false, a number from 0 to 1, " if has_two_classes else ""
            is_short = isinstance(label, str | int | float)
            description = f"{label!r:.40}" if is_short else name_json_type(label)
            raise MalformedRow(
                "bad_label",
                f"the label of step {number} must be {numbers}{join_choices(self.classes)}, not "
                f"{description}",
            )
        return float(label) if self.right == 1 else 1.0 - float(label)

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """Leave out whole steps at the end, with their labels.

        The prompt belongs to the first step.
        """
        prompt, first, *others = pieces
        pieces = [prompt + first, *others]
        fitting: list[list[int]] = []
        room = self.max_seq_length
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            room -= len(text) + len(end)
            if room < 0:
                break
            fitting += [text, end]
        if not fitting:
            self.counts.filtered["first_step_too_long"] += 1
            return None
        self.num_steps_cut += (len(pieces) - len(fitting)) // 2
        return fitting

    def store_row(self, pieces: Sequence[Sequence[int]], details: bytes) -> None:
        super().store_row(pieces, details[: BYTES_OF_LABEL * (len(pieces) // 2)])

    def suggest_remedy(self) -> str:
        return "raise it, so that the first step fits"

    def find_cut_warning(self) -> str | None:
        if not self.num_steps_cut:
            return None
        return (
            f"{spell_count(self.num_steps_cut, 'step')} are cut off at --max_seq_length, with "
            "their labels"
        )


class PlaceholderBuilder(StepBuilder):
    """Builds `{"input": text, "values": [a label for each placeholder]}`.

    The labels may also be the same text with a class's word in place of each placeholder.
    """

    columns = ("input", "values")

    def __init__(
        self,
        chat: ChatFormat,
        *,
        step_end: str,
        add_bos: bool,
        **more: Any,
    ) -> None:
        super().__init__(chat, step_end=step_end, **more)
        self.bos = (chat.tokenizer.bos_token or "") if add_bos else ""
        self.row_example = (
            f'{{"input": "a step{step_end} a step{step_end}", "values": [true, false]}}'
        )
        try:
            find_token_id(chat.tokenizer, step_end)
        except InputError as error:
            raise InputError(f"--placeholder_token: {error}", kind="bad_value") from None

    def find_prompt(self, row: Mapping[str, Any]) -> str:
        return self.bos

    def find_steps(self, row: Mapping[str, Any]) -> list[str]:
        if "input" not in row:
            hint = ""
            if "completions" in row:
                hint = "; without --placeholder_token a row has a list of steps"
            raise missing_key_error(row, "input", hint)
        text = row["input"]
        if not isinstance(text, str):
            raise MalformedRow("bad_step", f"'input' must be text, not {name_json_type(text)}")
        *steps, _ = text.split(self.step_end)
        if not steps:
            raise MalformedRow("no_step", f"'input' has no {self.step_end!r}, which ends a step")
        return _check_steps(steps, "input")

    def split_labels(self, labels: Any, steps: Sequence[str]) -> Any:
        """The labels, or the words that stand in a text where the placeholders are."""
        if not isinstance(labels, str):
            return labels
        words = []
        rest = labels
        for number, step in enumerate(steps, start=1):
            word = next((each for each in self.classes if rest.startswith(step + each)), None)
            if word is None:
                expected = f"{join_choices(self.classes)} in place of {self.step_end!r}"
                raise MalformedRow(
                    "bad_label",
                    f"its labels are not 'input' with {expected}, from step {number} on",
                )
            words.append(word)
            rest = rest.removeprefix(step + word)
        return words


def _check_steps(steps: Any, key: str) -> list[str]:
    """The steps under a key.

    Raises:
        MalformedRow: they are no list of texts that say something.
    """
    if not isinstance(steps, list) or not steps:
        raise MalformedRow(
            "no_step",
            f"{key!r} must be a list of steps, not {name_json_type(steps)} or an empty one",
        )
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, str) or not step.strip():
            raise MalformedRow(
                "bad_step", f"{key!r}, step {number}: must be text that is not empty"
            )
        _check_unicode(step, f"{key!r}, step {number}")
    return steps


def _check_unicode(text: str, where: str) -> None:
    """Refuse a text that JSON may spell, and no tokenizer reads.

    Raises:
        MalformedRow: it has half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedRow(
            "not_unicode", f"{where}: has half of a surrogate pair at character {error.start + 1}"
        ) from error
