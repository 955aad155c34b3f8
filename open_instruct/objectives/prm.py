"""Process reward models: the probability that each step of a solution is right, as one of two words after it.

Legend: N steps of a microbatch, R rows of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from open_instruct.config.sections import OptimSection, flag
from open_instruct.config.training import TrainingConfig
from open_instruct.config.validation import validated
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.rows import MalformedRow, kind_of
from open_instruct.data.messages import parse_conversation
from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.data.tokenizer import single_token_id
from open_instruct.objectives.objective import BoundLoss, Evaluation, LossOutputs, Objective, TokenLogprobs
from open_instruct.records import ROW_VALUES, Batch, mean_metrics
from open_instruct.wording import counted

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from open_instruct.data.token_dataset import TokenDataset

BYTES_OF_VALUE = 4
# Fields of the exported config.json.
STEP_END, IS_PLACEHOLDER, REWARD_TOKENS = "prm_step_end", "prm_is_placeholder", "prm_reward_tokens"


@dataclass(kw_only=True)
class StepSection:
    """Steps"""

    step_separator: str = flag(
        r"of rows with a list of steps: the text after each, whose last token is where the step is judged; \n is a "
        "line break",
        r"\n",
    )
    placeholder_token: str | None = flag(
        "of rows with one text: the token at the end of every step; default: rows have a list of steps", None
    )
    reward_tokens: list[str] = flag("labels of a right step and of a wrong one, a token each", ["+", "-"])

    @property
    def separator(self) -> str:
        return self.step_separator.replace(r"\n", "\n")


@dataclass(kw_only=True)
class PRMOptimSection(OptimSection):
    """Optimisation"""

    learning_rate: float = flag("peak learning rate", 1e-6, above=0)


@dataclass(kw_only=True)
class PRMConfig(TrainingConfig):
    """Train a process reward model on solutions whose steps are labelled, sharded as HSDP, and export it."""

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct prm configs/prm/qwen3_8b_8gpu.yaml --num_processes 8 --output_dir runs/prm",
        "open-instruct prm --model_name_or_path MODEL_DIR --mixer_list steps.jsonl 1.0 --output_dir runs/prm",
    )

    steps: StepSection
    optim: PRMOptimSection


def _problems(config: PRMConfig) -> Iterator[str]:
    steps = config.steps
    if config.parallel.tensor_parallel_degree > 1:
        yield (
            f"--tensor_parallel_degree {config.parallel.tensor_parallel_degree}: two logits are read where a split "
            "head has a part of them each; shard over more GPUs, or use --context_parallel_degree"
        )
    if len(set(steps.reward_tokens)) != 2 or len(steps.reward_tokens) != 2:
        yield f"--reward_tokens {' '.join(steps.reward_tokens)}: takes two tokens, such as + -"
    if not steps.step_separator or steps.placeholder_token == "":
        yield "--step_separator and --placeholder_token: an empty text ends no step; give one that does"


def texts_of_steps(row: Mapping[str, Any], chat: ChatFormat, *, separator: str, placeholder: str | None) -> list[str]:
    """The text of a row, cut where a step ends; with a placeholder the prompt belongs to the first step.

    Raises:
        MalformedRow: with the kind and the reason.
    """
    if placeholder is not None:
        return _ended_by_placeholder(row, placeholder)
    if "prompt" not in row:
        reason = "no key 'prompt': rows are a 'prompt' and 'completions' without --placeholder_token"
        raise MalformedRow("missing_key", reason)
    prompt: Any = row["prompt"]
    steps: Any = row.get("completions")
    if not isinstance(prompt, str):
        prompt, _ = chat.render(parse_conversation(row, "prompt", last_role="user"), ())
    if not prompt:
        raise MalformedRow("empty_prompt", "'prompt' is empty")
    if not isinstance(steps, list) or not steps:
        raise MalformedRow("no_step", f"'completions' must be a list of steps, not {kind_of(steps)} or an empty one")
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, str) or not step.strip():
            raise MalformedRow("bad_step", f"'completions', step {number}: must be text that is not empty")
    return [prompt, *(step + separator for step in steps)]


def _ended_by_placeholder(row: Mapping[str, Any], placeholder: str) -> list[str]:
    if "input" not in row:
        reason = "no key 'input': rows are an 'input' with the placeholder with --placeholder_token"
        raise MalformedRow("missing_key", reason)
    text = row["input"]
    if not isinstance(text, str):
        raise MalformedRow("bad_step", f"'input' must be text, not {kind_of(text)}")
    *ended, _ = text.split(placeholder)
    if not ended:
        raise MalformedRow("no_step", f"'input' has no {placeholder!r}, which ends a step")
    return [step + placeholder for step in ended]


def labels_of(row: Mapping[str, Any], key: str, num_steps: int, reward_tokens: Sequence[str]) -> tuple[float, ...]:
    """The probability that each step is right.

    Raises:
        MalformedRow: there are more or fewer labels than steps, or a label is not valid.
    """
    labels = row.get(key)
    if not isinstance(labels, list):
        raise MalformedRow("bad_label", f"{key!r} must be a list with a label for each step, not {kind_of(labels)}")
    if len(labels) != num_steps:
        reason = f"{key!r} has {counted(len(labels), 'label')} for {counted(num_steps, 'step')}"
        raise MalformedRow("label_count", reason)
    right, wrong = reward_tokens
    values = []
    for number, label in enumerate(labels, start=1):
        value = {right: 1.0, wrong: 0.0}.get(label) if isinstance(label, str) else label
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            kinds = f"neither {right!r} nor {wrong!r}, nor true or false, nor a number from 0 to 1"
            raise MalformedRow("bad_label", f"{key!r}, step {number}: {label!r} is {kinds}")
        values.append(float(value))
    return tuple(values)


def places(pieces: Sequence[Sequence[int]], *, has_prompt: bool, longest: int) -> list[list[int]]:
    """For each step that fits whole, two lists in turn: the tokens before its end, and the token at its end.

    The first list of all begins with the prompt, if that is a piece of its own.
    """
    if has_prompt:
        prompt, first, *others = pieces
        pieces = [[*prompt, *first], *others]
    kept: list[list[int]] = []
    room = longest
    for step in pieces:
        room -= len(step)
        if room < 0:
            break
        kept += [list(step[:-1]), [step[-1]]]
    return kept


class StepBuilder(RowBuilder):
    """Builds solutions, read where each of their steps ends: `{"prompt", "completions": [text], "labels": [true]}`, or
    with a placeholder `{"input": text, "label": ["+"]}`.
    """

    unit = "solution"
    wanted = '{"prompt": "text", "completions": ["a step", "a step"], "labels": [true, false]}'
    page = "docs/prm.md"
    reads_ends = True

    def __init__(
        self,
        chat: ChatFormat,
        *,
        separator: str,
        placeholder: str | None,
        reward_tokens: Sequence[str],
        **common: Any,
    ) -> None:
        super().__init__(chat, **common)
        self.separator = separator
        self.placeholder = placeholder
        self.reward_tokens = reward_tokens
        self.num_steps_cut = 0
        if placeholder is not None:
            self.wanted = f'{{"input": "a step{placeholder} a step{placeholder}", "label": ["+", "-"]}}'
        self.placeholder_id = placeholder and single_token_id(chat.tokenizer, placeholder)

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        texts = texts_of_steps(row, self.chat, separator=self.separator, placeholder=self.placeholder)
        if self.placeholder is None:
            labels = labels_of(row, "labels", len(texts) - 1, self.reward_tokens)
            return RenderedRow(texts=tuple(texts), values=labels)
        labels = labels_of(row, "label", len(texts), self.reward_tokens)
        pieces = self.chat.tokenize(texts)
        num_found = sum(piece[-1] == self.placeholder_id for piece in pieces)
        if num_found < len(pieces):
            which = f"{num_found} of {len(pieces)} placeholders {self.placeholder!r} are tokens of their own"
            raise MalformedRow("placeholder", f"{which}: the tokenizer joins the others with the text before them")
        if len(pieces[0]) < 2:
            raise MalformedRow("no_step", "'input' begins with the placeholder: there is no step before it")
        return RenderedRow(texts=tuple(texts), values=labels)

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        """Cut whole steps on the right, with their labels; never cut the prompt."""
        has_prompt = self.placeholder is None
        kept = places(pieces, has_prompt=has_prompt, longest=self.max_seq_length)
        if not kept:
            self.filtered[self.too_long] += 1
            return None
        self.num_steps_cut += len(pieces) - has_prompt - len(kept) // 2
        return kept

    def keep(self, pieces: Sequence[Sequence[int]], details: bytes) -> None:
        super().keep(pieces, details[: BYTES_OF_VALUE * (len(pieces) // 2)])

    def cut_warning(self) -> str | None:
        if not self.num_steps_cut:
            return None
        return f"{counted(self.num_steps_cut, 'step')} cut off at --max_seq_length, with their labels"


def step_losses(logits_N2: torch.Tensor, right_N: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the two words against the probability that a step is right; float32.

    Lightman et al. (2023, arXiv:2305.20050) for hard labels, Wang et al. (2023, arXiv:2312.08935) for soft.
    """
    logprobs_N2 = logits_N2.float().log_softmax(dim=1)
    return -(right_N * logprobs_N2[:, 0] + (1 - right_N) * logprobs_N2[:, 1])


def judged_steps(scores: TokenLogprobs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each step, and whether the likelier word is the label's."""
    logits_N2, right_N = scores.values_NC, batch.values[ROW_VALUES]
    assert logits_N2 is not None and len(logits_N2) == len(right_N)
    is_right_N = (logits_N2[:, 0] > logits_N2[:, 1]) == (right_N > 0.5)
    return step_losses(logits_N2, right_N), is_right_N.float()


def bind(steps: StepSection) -> BoundLoss:
    def function(scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        losses_N, is_right_N = judged_steps(scores, batch)
        metrics = mean_metrics({"loss": losses_N.detach(), "accuracy": is_right_N})
        return LossOutputs(loss=losses_N.sum() / counts["labels"], metrics=metrics)

    return BoundLoss(function=function, classes=tuple(steps.reward_tokens), summed=judged_steps)


def evaluate(
    dataset: TokenDataset, judged_R2: np.ndarray, reference_R1: np.ndarray | None, config: PRMConfig
) -> Evaluation:
    """The means of loss and accuracy over the steps of held-out solutions."""
    num_steps = int(dataset.num_label_tokens.sum())
    loss, accuracy = (float(total) / num_steps for total in judged_R2.sum(axis=0, dtype="float64"))
    return Evaluation(
        row={"eval/loss": loss, "eval/accuracy": accuracy, "eval/num_steps": num_steps},
        sentence=f"held-out accuracy {{when}}: {accuracy:.3f} of {counted(num_steps, 'step')}, loss {loss:.4f}",
    )


def exported(config: PRMConfig, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig) -> dict[str, Any]:
    """The fields that tell how to query the model: the end of a step, and the two words of the answer."""
    steps = config.steps
    return {
        STEP_END: steps.placeholder_token or steps.separator,
        IS_PLACEHOLDER: steps.placeholder_token is not None,
        REWARD_TOKENS: list(steps.reward_tokens),
    }


PRM = Objective(
    name="prm",
    config_class=PRMConfig,
    validate=lambda config: validated(config, _problems(config)),
    rows=StepBuilder,
    bind=lambda config: bind(config.steps),
    evaluate=evaluate,
    row_arguments=lambda config: {
        "separator": config.steps.separator,
        "placeholder": config.steps.placeholder_token,
        "reward_tokens": list(config.steps.reward_tokens),
    },
    exported=exported,
)
