"""KTO: single replies, each labelled as desirable or not (arXiv 2402.01306).

A reply is compared with z0, the policy's divergence from the reference on replies that do not
belong to their prompts. So a row has two documents: its prompt with its own reply, and its prompt
with the reply of another row. The second is scored before the step, without gradient; the step
learns from the first alone. A pair of replies is two rows.

Legend: R rows, N those of a data set, D documents of a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from open_instruct.config.sections import OptimSection, PreferenceDataSection, flag, free_flag
from open_instruct.config.training import TrainingConfig, with_held_out
from open_instruct.core.batch_values import UnpairedValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Batch, Metric, StepBatch, mean_metrics
from open_instruct.core.text import counted
from open_instruct.data.conversations.messages import Message, check_is_learned
from open_instruct.data.conversations.row_forms import find_conversation
from open_instruct.data.conversations.row_keys import missing_key_error
from open_instruct.data.eval_split import row_content
from open_instruct.data.files.rows import MalformedRow, RawRow, RowSource, kind_of
from open_instruct.data.preference_rows import parse_preference_row
from open_instruct.data.row_builder import RenderedRow, RowBuilder
from open_instruct.losses.logprobs import ROUNDING, sum_by_sequence
from open_instruct.objectives.objective import (
    BoundLoss,
    Evaluation,
    Gather,
    LossOutputs,
    Objective,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from open_instruct.data.token_dataset import TokenDataset

# Bounds of the ratio of the total weights of desirable and undesirable rows; the paper's section
# 4.2.
LOWEST_RATIO, HIGHEST_RATIO = 1.0, 4.0 / 3.0
DESIRABLE = "desirable"  # the name of their number among a step's counts


@dataclass(kw_only=True)
class KTOLossSection:
    """The loss of KTO."""

    title: ClassVar[str] = "Loss"

    loss_type: Literal["kto", "apo_zero_unpaired"] = flag(
        (
            "'kto' measures replies from z0, the policy's distance from the reference; "
            "'apo_zero_unpaired' from 0"
        ),
        "kto",
    )
    beta: float = flag(
        "strength of the pull towards the reference policy (scale of the reward)", 0.1, above=0
    )
    desirable_weight: float = flag("weight of a row whose label is true", 1.0, above=0)
    undesirable_weight: float = flag("weight of a row whose label is false", 1.0, above=0)
    cache_logprobs_only: bool = free_flag(
        "compute and store the reference log-probs, then stop", False
    )

    @property
    def has_mismatched(self) -> bool:
        return self.loss_type == "kto"


@dataclass(kw_only=True)
class KTOOptimSection(OptimSection):
    """As of any offline run, with the learning rate of KTO."""

    learning_rate: float = flag("peak learning rate", 1e-6, above=0)


@dataclass(kw_only=True)
class KTOConfig(TrainingConfig):
    """Train a model with KTO on single replies that are labelled good or bad, sharded as HSDP, and
    export it.

    Examples:
        open-instruct kto --model_name_or_path MODEL_DIR --mixer_list labelled.jsonl 1.0
            --output_dir runs/first
        open-instruct kto kto/olmo3_7b_8gpu --num_processes 8 --output_dir runs/olmo3_kto
    """

    data: PreferenceDataSection
    loss: KTOLossSection
    optim: KTOOptimSection

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        return with_held_out("loss", "rewards/accuracy", "rewards/margin")


def parse_labelled_row(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """The conversation of a row, which ends with the labelled reply, and whether the reply is
    desirable.

    Raises:
        MalformedRow: with the kind and the reason; docs/kto.md lists them.
    """
    messages = find_conversation(row)
    check_is_learned(messages[-1], "the row")
    if "label" not in row:
        raise missing_key_error(row, "label")
    label = row["label"]
    if isinstance(label, str):  # tables hold text only
        label = {"true": True, "1": True, "false": False, "0": False}.get(
            label.strip().lower(), label
        )
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        shown = f"{label!r:.40}" if isinstance(label, str | int | float) else kind_of(label)
        raise MalformedRow("bad_label", f"'label' must be true or false (or 1 or 0), not {shown}")
    return messages, bool(label)


class UnpairedBuilder(RowBuilder):
    """Builds rows of two pieces, the prompt and the reply; the label is the row's number for the
    loss.
    """

    unit = "row"
    row_example = (
        '{"prompt": "text", "completion": "text", "label": true}, or lists of messages in place '
        "of the texts"
    )
    columns = ("prompt", "completion", "label")
    docs_page = "docs/kto.md"
    check = staticmethod(parse_labelled_row)

    @classmethod
    def adapt_source(cls, source: RowSource) -> RowSource:
        """The source; if its first readable row is a preference pair, every pair gives two rows."""
        first = next(
            (row.value for row in source.rows(range(len(source))) if row.problem is None), {}
        )
        return _both_replies(source) if "chosen" in first and "label" not in first else source

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        messages, label = parse_labelled_row(row)
        prompt, (text,) = self.chat.render(messages[:-1], messages[-1:])
        # Both replies to a prompt are on one side of --eval_split.
        content = row_content({"messages": messages[:-1]})
        return RenderedRow(texts=(prompt, text), values=(float(label),), content=content)


class MismatchedBuilder(UnpairedBuilder):
    """As `UnpairedBuilder`, with a third piece: the reply of another row of the source, see
    `mismatched_replies`.
    """

    documents_per_row = 2
    document_titles = ("reply", "a reply of another row, for z0")

    def finish_source(self, name: str, first: int) -> None:
        rows = self.store.pop_rows(first)
        prompts: dict[bytes, int] = {}
        replies: dict[bytes, int] = {}
        numbers = []
        for (prompt, reply), _ in rows:
            prompt_number = prompts.setdefault(prompt.tobytes(), len(prompts))
            reply_number = replies.setdefault(reply.tobytes(), len(replies))
            numbers.append((prompt_number, reply_number))
        if len(replies) == 1:
            raise InputError(
                f"{name}: {counted(len(rows), 'row')}, all with the same reply, but z0 of "
                "--loss_type kto needs another one for each prompt; add rows with other replies, "
                "or use --loss_type apo_zero_unpaired",
                kind="bad_row",
            )
        distinct = [array("i", reply) for reply in replies]
        chosen = mismatched_replies(numbers)
        for ((prompt, reply), details), number in zip(rows, chosen, strict=True):
            room = self.max_seq_length - len(prompt)
            others = (
                distinct[(number + step) % len(distinct)][:room] for step in range(len(distinct))
            )
            # Replies that differ only behind the cut are equal here; where none differs, it is the
            # row's own.
            other = next((each for each in others if each != reply), reply)
            self.store_row([prompt, reply, other], details)


def mismatched_replies(rows: Sequence[tuple[int, int]]) -> list[int]:
    """For each row, given the numbers of its prompt and its reply, the number of a reply that does
    not belong to it.

    Distinct replies, two at least, are numbered from 0 as they first come. Each row takes the next
    one after its own, after the last the first, that came with another prompt; where all have come
    with its prompt, the next one.
    """
    # Of several prompts the first.
    prompt_of_reply = {reply: prompt for prompt, reply in reversed(rows)}
    num_replies = len(prompt_of_reply)
    # The first after each reply that came with another prompt than it; the second round sees past
    # the end.
    leaps = [0] * num_replies
    for reply in [*reversed(range(num_replies))] * 2:
        after = (reply + 1) % num_replies
        leaps[reply] = after if prompt_of_reply[after] != prompt_of_reply[reply] else leaps[after]
    chosen = []
    for prompt, reply in rows:
        after = (reply + 1) % num_replies
        other = leaps[after] if prompt_of_reply[after] == prompt else after
        chosen.append(after if other == reply or prompt_of_reply[other] == prompt else other)
    return chosen


def _both_replies(pairs: RowSource) -> RowSource:
    """A source of preference pairs as twice as many rows: each chosen reply is desirable, each
    rejected one is not.
    """

    def rows(indices: Sequence[int]) -> Iterator[RawRow]:
        wanted = set(indices)
        taken = sorted({index // 2 for index in indices})
        for pair, row in zip(taken, pairs.rows(taken), strict=True):
            for offset, each in enumerate(_both_rows(row)):
                if 2 * pair + offset in wanted:
                    yield each

    return replace(pairs, num_rows=2 * len(pairs), rows=rows)


def _both_rows(row: RawRow) -> tuple[RawRow, ...]:
    try:
        chosen, rejected = parse_preference_row(row.content())
    except MalformedRow as error:
        return (replace(row, problem=error),) * 2
    return tuple(
        replace(row, value={"messages": list(messages), "label": label})
        for messages, label in ((chosen, True), (rejected, False))
    )


def check_rows(dataset: TokenDataset, num_rows_per_step: int, config: KTOConfig) -> list[str]:
    """Warnings about the balance of labels and weights.

    Raises:
        InputError: a global batch of one row.
    """
    loss = config.loss
    if loss.has_mismatched and num_rows_per_step == 1:
        raise InputError(
            "a global batch of one row: z0 of --loss_type kto is a mean over the rows of a step, "
            "and one row says nothing of the policy's distance from the reference; raise "
            "--per_device_train_batch_size or --gradient_accumulation_steps, or use --loss_type "
            "apo_zero_unpaired",
            kind="conflict",
        )
    num_desirable = int(_are_desirable(dataset).sum())
    num_undesirable = len(dataset) - num_desirable
    if not (num_desirable and num_undesirable):
        which = DESIRABLE if num_desirable else "undesirable"
        return [
            (
                f"all {counted(len(dataset), 'row')} are {which}: nothing is learned of what sets "
                "good from bad"
            )
        ]
    balance = num_desirable / num_undesirable
    ratio = loss.desirable_weight / loss.undesirable_weight * balance
    if LOWEST_RATIO - 1e-6 <= ratio <= HIGHEST_RATIO + 1e-6:
        return []
    weight = loss.undesirable_weight / balance
    other_weight = loss.desirable_weight * balance
    return [
        f"{num_desirable:,} desirable rows of weight {loss.desirable_weight:g} count {ratio:.3g} "
        f"times as much as {num_undesirable:,} undesirable ones of weight "
        f"{loss.undesirable_weight:g}, where KTO's paper advises 1 to 4/3: --desirable_weight "
        f"{LOWEST_RATIO * weight:.3g} to {HIGHEST_RATIO * weight:.3g} would do, or "
        f"--undesirable_weight {other_weight / HIGHEST_RATIO:.3g} to "
        f"{other_weight / LOWEST_RATIO:.3g}"
    ]


def _are_desirable(dataset: TokenDataset) -> np.ndarray:
    """The labels of all rows: bool (N,)."""
    labels: np.ndarray = dataset.details_C.view("float32")[dataset.bounds_N4[:, 2] // 4] > 0
    return labels


def unpaired_losses(
    log_ratios_R: torch.Tensor,
    is_desirable_R: torch.Tensor,
    z0: torch.Tensor | float,
    loss: KTOLossSection,
) -> torch.Tensor:
    """KTO, arXiv 2402.01306 eq. 7 and 8: `w_D (1 - sigmoid(beta (r - z0)))`, or `w_U (1 -
    sigmoid(beta (z0 - r)))`.

    With z0 of 0 it is APO-zero on single replies (arXiv 2408.06266): `1 - sigmoid(beta r)`, or
    `sigmoid(beta r)`.
    """
    above_R = (log_ratios_R - z0) * (2 * is_desirable_R.to(log_ratios_R.dtype) - 1)
    weights_R = is_desirable_R * loss.desirable_weight + ~is_desirable_R * loss.undesirable_weight
    # 1 - sigmoid(x) is sigmoid(-x), which keeps its digits where x is large.
    return weights_R * (-loss.beta * above_R).sigmoid()


def bind(config: KTOConfig) -> BoundLoss:
    """The loss that the flags name."""
    loss = config.loss

    def looks_at(step: StepBatch) -> StepBatch:
        if not loss.has_mismatched:
            return replace(step, microbatches=())
        return _with_document(step, 1, config)

    def prepare(step: StepBatch, scores: Sequence[TokenLogprobs], gather: Gather) -> StepBatch:
        """Count the desirable rows of the global batch, and take z0 from its mismatched replies."""
        import torch

        num_desirable = int(
            gather(torch.cat([_values(batch).is_desirable_R for batch in step.microbatches])).sum()
        )
        z0 = torch.zeros(())
        learned = step
        if loss.has_mismatched:
            log_ratios = [
                _log_ratios(each, _values(batch).reference_logps_S[len(batch.row_ids) :])[1]
                for each, batch in zip(scores, step.microbatches, strict=True)
            ]
            z0 = gather(torch.cat(log_ratios)).double().mean().clamp(min=0).float()
            learned = _with_document(step, 0, config)
        return StepBatch(
            microbatches=tuple(
                replace(batch, values=replace(_values(batch), z0=z0))
                for batch in learned.microbatches
            ),
            counts={**step.counts, DESIRABLE: num_desirable},
        )

    def function(scores: TokenLogprobs, batch: Batch, counts: Mapping[str, int]) -> LossOutputs:
        values = _values(batch)
        assert values.z0 is not None, "see `prepare`"
        logps_R, log_ratios_R = _log_ratios(scores, values.reference_logps_S)
        return outputs_of(logps_R, log_ratios_R, values.is_desirable_R, values.z0, counts, loss)

    def first_loss(counts: Mapping[str, int]) -> float:
        num_undesirable = counts["rows"] - counts[DESIRABLE]
        weights = (
            loss.desirable_weight * counts[DESIRABLE] + loss.undesirable_weight * num_undesirable
        )
        return weights / (2 * counts["rows"])

    return BoundLoss(
        function=function,
        values_class=UnpairedValues,
        prepare=prepare,
        looks_at=looks_at,
        first_loss=first_loss,
    )


def _with_document(step: StepBatch, document: int, config: KTOConfig) -> StepBatch:
    """The step with only the document number `document` of each row."""
    from open_instruct.batching.documents import pack_documents

    parallel = config.parallel
    microbatches = []
    for batch in step.microbatches:
        own = slice(document * len(batch.row_ids), (document + 1) * len(batch.row_ids))
        packed = pack_documents(
            batch.documents[own],
            packing=config.data.packing,
            pad_to_multiple_of=parallel.tensor_parallel_degree * parallel.context_parallel_degree,
        )
        values = _values(batch)
        values = replace(values, reference_logps_S=values.reference_logps_S[own])
        microbatches.append(
            replace(batch, packed=packed, documents=batch.documents[own], values=values)
        )
    return replace(step, microbatches=tuple(microbatches))


def _values(batch: Batch) -> UnpairedValues:
    return UnpairedValues.read(batch.values)


def _log_ratios(
    scores: TokenLogprobs, reference_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-prob of each document, and its difference from the reference's."""
    from open_instruct.batching.documents import on_device

    logps_R, _ = sum_by_sequence(scores.logprobs_N, scores.sequence_ids_N, len(reference_R))
    return logps_R, logps_R - on_device(reference_R, logps_R.device)


def outputs_of(
    logps_R: torch.Tensor,
    log_ratios_R: torch.Tensor,
    is_desirable_R: torch.Tensor,
    z0: torch.Tensor,
    counts: Mapping[str, int],
    loss: KTOLossSection,
) -> LossOutputs:
    """The share of R rows in the loss and the metrics of their global batch; an absent class has no
    metrics.
    """
    losses_R = unpaired_losses(log_ratios_R, is_desirable_R, z0, loss)
    rewards_R = loss.beta * log_ratios_R.detach()
    is_right_R = (log_ratios_R - z0 > ROUNDING * logps_R.abs()) == is_desirable_R
    metrics = mean_metrics({"loss": losses_R.detach(), "rewards/accuracy": is_right_R.float()})
    if loss.has_mismatched:
        metrics["kl"] = Metric(value=z0, weight=float(losses_R.numel()))
    num_undesirable = counts["rows"] - counts[DESIRABLE]
    classes = (
        ("chosen", is_desirable_R, counts[DESIRABLE]),
        ("rejected", ~is_desirable_R, num_undesirable),
    )
    for name, is_member_R, num in classes:
        if num:
            for what, values_R in (("rewards", rewards_R), ("logps", logps_R.detach())):
                metrics[f"{what}/{name}"] = Metric(
                    value=(values_R * is_member_R).sum() / num, reduction="sum"
                )
    if counts[DESIRABLE] and num_undesirable:
        margin = metrics["rewards/chosen"].value - metrics["rewards/rejected"].value
        metrics["rewards/margin"] = Metric(value=margin, reduction="sum")
    return LossOutputs(loss=losses_R.sum() / counts["rows"], metrics=metrics)


def evaluate(
    dataset: TokenDataset, logps_ND: np.ndarray, reference_ND: np.ndarray | None, config: KTOConfig
) -> Evaluation:
    """The loss and rewards on held-out rows, with one z0 for all of them."""
    import torch

    assert reference_ND is not None
    logps_DN, log_ratios_DN = (
        torch.from_numpy(logps_ND).T,
        torch.from_numpy(logps_ND - reference_ND).T,
    )
    is_desirable_N = torch.from_numpy(_are_desirable(dataset))
    # Rows without a mismatched reply give z0 = 0.
    z0 = log_ratios_DN[1:].double().sum().clamp(min=0).float() / len(dataset)
    counts = {"rows": len(dataset), DESIRABLE: int(is_desirable_N.sum())}
    metrics = outputs_of(
        logps_DN[0], log_ratios_DN[0], is_desirable_N, z0, counts, config.loss
    ).metrics
    row = {f"eval/{name}": float(metric.value) for name, metric in metrics.items()} | {
        "eval/num_rows": len(dataset)
    }
    sentence = f"held-out loss {{when}}: {row['eval/loss']:.4f} over {counted(len(dataset), 'row')}"
    return Evaluation(row=row, sentence=sentence)


KTO = Objective(
    name="kto",
    config_class=KTOConfig,
    rows=MismatchedBuilder,
    rows_under=lambda config: MismatchedBuilder if config.loss.has_mismatched else UnpairedBuilder,
    documents_learned=1,
    check_rows=check_rows,
    bind=bind,
    needs_reference=lambda config: True,
    only_scores=lambda config: config.loss.cache_logprobs_only,
    prefix_sharing=lambda config: config.data.prefix_sharing,
    evaluate=evaluate,
)
