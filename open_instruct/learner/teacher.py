"""A frozen teacher beside the policy: a model that is sharded as the policy is, or what was kept of its distributions.

The matrix of the teacher's head is gathered once and stays: the policy's head multiplies with it chunk by chunk, in the
forward and again in the backward pass, when the teacher's own parameters have long been shards again.

Legend: N labelled tokens, V vocabulary, D width of the teacher, C numbers kept of a distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer

from open_instruct.config.training import TrainingConfig
from open_instruct.data.cache import cache_root
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.errors import InputError
from open_instruct.learner.forward import beside_labels, hidden_at_labels, token_logprobs
from open_instruct.learner.reference_policy import build_teacher, open_teacher
from open_instruct.learner.row_cache import RowCache, open_row_cache
from open_instruct.learner.scoring import Scorer
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.models.shards import reshard, whole_of
from open_instruct.objectives.objective import Teacher
from open_instruct.parallel.process import gathered, on_main_process
from open_instruct.parallel.wording import counted
from open_instruct.records import ROW_VALUES, Batch, ShardLayout
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTeacher:
    """A teacher's checkpoint, checked. Both heads have `vocab_size` rows; where one has more, the rest is padding."""

    teacher: Teacher
    pretrained: Pretrained
    vocab_size: int

    @classmethod
    def of(cls, teacher: Teacher, student: Pretrained, *, config: TrainingConfig, layout: ShardLayout) -> OpenedTeacher:
        """See `open_teacher`.

        :raises InputError: what is to be kept of a distribution is more than there is of it, too.
        """
        pretrained = open_teacher(teacher.model_name_or_path, student, config=config, layout=layout)
        vocab_size = min(student.hf_config.vocab_size, pretrained.hf_config.vocab_size)
        if teacher.num_kept >= vocab_size:
            raise InputError(
                f"--teacher_top_k {teacher.num_kept}: the vocabulary has {vocab_size:,} tokens, of which fewer must be "
                "kept; leave it out to compare all of them"
            )
        return cls(teacher=teacher, pretrained=pretrained, vocab_size=vocab_size)

    def of_both(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV[:, : self.vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a policy is compared with at every label: the model with its head's matrix, whole and in the dtype that is
    computed in; or, where there is none, the numbers that come with the rows."""

    opened: OpenedTeacher
    model: Transformer | None = None
    head_VD: torch.Tensor | None = None

    def measure(self, policy: Transformer, batch: Batch, *, device: torch.device) -> Measure:
        """What a forward pass of `policy` over a microbatch is to compute of its logits."""
        if self.model is None:
            num_labels = int((batch.packed.sequence_ids_BT >= 0).sum())
            kept_NC = batch.values[ROW_VALUES].view(num_labels, -1 if num_labels else 1)
            return Measure(self.compare_kept, (beside_labels(policy, batch.packed, kept_NC, device=device),))
        with torch.no_grad(), adapters_off(self.model):
            hidden_BKD = hidden_at_labels(self.model, batch.packed, policy, device)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        return Measure(self.compare_logits, (hidden_BKD,))

    def compare_kept(self, logits_NV: torch.Tensor, kept_NC: torch.Tensor) -> torch.Tensor:
        return self.opened.teacher.compare(self.opened.of_both(logits_NV), kept_NC)

    def compare_logits(self, logits_NV: torch.Tensor, hidden_ND: torch.Tensor) -> torch.Tensor:
        assert self.head_VD is not None
        teacher_NV = F.linear(hidden_ND, self.head_VD).float()
        return self.opened.teacher.compare(self.opened.of_both(logits_NV), self.opened.of_both(teacher_NV))


def compare_with(
    opened: OpenedTeacher,
    rows: TokenDataset,
    heldout: TokenDataset | None,
    *,
    student: Pretrained,
    scorer: Scorer,
    run: Run,
    config: TrainingConfig,
) -> tuple[Comparison, TokenDataset, TokenDataset | None]:
    """What the policy is compared with, and the rows that it is compared on. Collective; the policy is built.

    Where only a part of each distribution is kept, that comes with the rows, from the cache or from the teacher, which
    is there no longer afterwards.
    """

    def build() -> Transformer:
        return build_teacher(opened.pretrained, student, scorer.policy, run=run, config=config)

    if opened.teacher.keep is None:
        model = build()
        head_VD = whole_of(model.lm_head.w_out.weight, getattr(torch, config.model.param_dtype))
        return Comparison(opened=opened, model=model, head_VD=head_VD), rows, heldout
    folder, laid_out = cache_root(config.data.cache_dir), "packed" if scorer.shape.packing else "padded"
    words = (config.model.param_dtype, laid_out, opened.teacher.kept_as, str(opened.vocab_size))
    cache = open_row_cache(folder / "teacher_distributions", opened.pretrained, *words)
    datasets = [dataset for dataset in (rows, heldout) if dataset is not None]
    num_missing = len({dataset.key(row) for dataset in datasets for row in cache.missing(dataset)})
    run.console.say(f"teacher's distributions: {counted(len(cache), 'row')} cached, {num_missing:,} to compute")
    if num_missing:
        model = build()
        with adapters_off(model):
            for dataset in datasets:
                _keep(opened, opened.teacher.keep, model, dataset, cache=cache, scorer=scorer)
        on_main_process(cache.write)
    return Comparison(opened=opened), cache.beside(rows), None if heldout is None else cache.beside(heldout)


@torch.no_grad()
def _keep(
    opened: OpenedTeacher,
    keep: Callable[[torch.Tensor], torch.Tensor],
    model: Transformer,
    dataset: TokenDataset,
    *,
    cache: RowCache,
    scorer: Scorer,
) -> None:
    """Have the teacher read the rows that `cache` lacks, and put what is kept of them there, on every rank."""
    measure = Measure(lambda logits_NV: keep(opened.of_both(logits_NV)))
    for batch in scorer.batches(dataset, cache.missing(dataset), title="teacher's distributions"):
        kept_NC = token_logprobs(model, batch.packed, device=scorer.device, measure=measure).measured_N
        assert kept_NC is not None
        lengths = dataset.num_label_tokens[list(batch.row_ids)].tolist()
        of_rows = zip(batch.row_ids, kept_NC.float().cpu().split(lengths), strict=True)
        own = {dataset.key(row): values_NC.numpy() for row, values_NC in of_rows}
        for key, values_NC in chain.from_iterable(each.items() for each in gathered(own, scorer.dp_group)):
            cache.add(key, values_NC)
    reshard(model)
