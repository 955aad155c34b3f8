"""The teacher of a distillation: frozen, sharded as the policy, compared with it at every label.

The matrix of the teacher's head is gathered once and stays: the policy's head multiplies with it
chunk by chunk, in the forward and again in the backward pass, when the teacher's own parameters
have long been shards again. Where only a part of each distribution is kept, rows carry the numbers
and the teacher is freed.

Legend: N labelled tokens, V vocabulary, D width of the teacher, C numbers kept of a distribution.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer

from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.core.batch_values import TeacherValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Batch
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import spell_count
from open_instruct.data.files.array_file import find_cache_folder
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.lora.adapters import disable_adapters
from open_instruct.models.shards import gather_full, reshard
from open_instruct.objectives.objective import Teacher
from open_instruct.parallel.process import gather_objects, run_on_main_process
from open_instruct.parallel.status import this_process
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.backend import Backend
from open_instruct.training.model.forward import (
    hidden_at_labels,
    token_logprobs,
)
from open_instruct.training.model.forward_inputs import place_at_labels
from open_instruct.training.open_companion import open_companion_model
from open_instruct.training.reference import build_reference
from open_instruct.training.row_cache import RowCache, open_row_cache
from open_instruct.training.rows.scoring_batches import scoring_batches
from open_instruct.training.rows.training_rows import TrainingRows


def build_teacher(
    teacher: Pretrained,
    student: Pretrained,
    policy: Transformer,
    *,
    run: Run,
    config: LearnerConfig,
) -> Transformer:
    """Build the model that `open_companion_model` opened. Collective.

    Where the teacher is the `student`'s start model and the student only trains adapters, the
    result is `policy` itself; call it within `disable_adapters`.
    """
    this_process.begin("loading the teacher")
    if config.adapters is not None and teacher.is_same_as(student):
        run.console.say(
            "the teacher is the start model: the policy with its adapters off, so no second one "
            "is loaded"
        )
        return policy
    model = build_reference(teacher, run=run, config=config)
    run.console.say(f"loaded the teacher ({model.num_params / 1e6:,.1f}M parameters)")
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherComparison:
    """A policy is compared with a teacher, whose checkpoint is opened and checked, at every label.

    The teacher is a `model` with its head's matrix (`head_VD`, whole, in the compute dtype).
    Without a `model` the rows carry the numbers that were kept of the teacher's distributions. Both
    heads have `vocab_size` rows; where one has more, the rest is padding.
    """

    teacher: Teacher
    pretrained: Pretrained
    vocab_size: int
    model: Transformer | None = None
    head_VD: torch.Tensor | None = None

    @classmethod
    def open(
        cls,
        teacher: Teacher,
        student: Pretrained,
        *,
        config: TrainingConfig,
        layout: ShardLayout,
    ) -> Self:
        """Open the teacher's checkpoint with `open_companion_model`; `model` comes later.

        :raises InputError: also where --teacher_top_k is not smaller than the vocabulary.
        """
        pretrained = open_companion_model(
            "teacher", teacher.model_name_or_path, student, config=config, layout=layout
        )
        vocab_size = min(student.hf_config.vocab_size, pretrained.hf_config.vocab_size)
        if teacher.num_kept >= vocab_size:
            raise InputError(
                f"--teacher_top_k {teacher.num_kept}: the vocabulary has {vocab_size:,} tokens, "
                "of which fewer must be kept; leave it out to compare all of them",
                kind="conflict",
            )
        return cls(teacher=teacher, pretrained=pretrained, vocab_size=vocab_size)

    def shared_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV[:, : self.vocab_size]

    def measure(self, policy: Transformer, batch: Batch, *, device: torch.device) -> Measure:
        """The `Measure` of the logits of a forward pass of `policy` over a microbatch."""
        if self.model is None:
            num_labels = len(batch.packed.sequence_ids_N)
            stored_numbers = TeacherValues.read(batch.values).stored_numbers
            assert stored_numbers is not None, "rows carry what is stored where there is no model"
            kept_NC = stored_numbers.view(num_labels, -1 if num_labels else 1)
            kept_BKC = place_at_labels(policy, batch.packed, kept_NC, device=device)
            return Measure(self.compare_stored, (kept_BKC,))
        with torch.no_grad(), disable_adapters(self.model):
            hidden_BKD = hidden_at_labels(self.model, batch.packed, policy, device)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        return Measure(self.compare_logits, (hidden_BKD,))

    def compare_stored(self, logits_NV: torch.Tensor, kept_NC: torch.Tensor) -> torch.Tensor:
        return self.teacher.compare(self.shared_logits(logits_NV), kept_NC)

    def compare_logits(self, logits_NV: torch.Tensor, hidden_ND: torch.Tensor) -> torch.Tensor:
        assert self.head_VD is not None
        teacher_NV = F.linear(hidden_ND, self.head_VD).float()
        return self.teacher.compare(self.shared_logits(logits_NV), self.shared_logits(teacher_NV))


def build_comparison(
    comparison: TeacherComparison,
    rows: TrainingRows,
    *,
    student: Pretrained,
    backend: Backend,
    run: Run,
    config: LearnerConfig,
) -> tuple[TeacherComparison, TrainingRows]:
    """The teacher to compare the policy of `backend` with, and the rows. Collective.

    Where only a part of each distribution is kept, the rows carry it, from the cache or from a pass
    of the teacher, which is freed afterwards.
    """
    policy = backend.computing_model
    build = partial(build_teacher, comparison.pretrained, student, policy, run=run, config=config)
    if comparison.teacher.keep is None:
        model = build()
        compute_dtype = getattr(torch, config.model.param_dtype)
        head_VD = gather_full(model.lm_head.w_out.weight, compute_dtype).to(model.device)
        return replace(comparison, model=model, head_VD=head_VD), rows
    cache = open_teacher_cache(
        comparison, rows, cache_dir=config.data.cache_dir, precision=config.reference_precision
    )
    datasets = [rows.dataset]
    if rows.heldout is not None:
        datasets.append(rows.heldout)
    num_missing = len(find_missing_keys(cache, datasets))
    run.console.say(
        f"teacher's distributions: {spell_count(len(cache), 'row')} cached, {num_missing:,} to "
        "compute"
    )
    if num_missing:
        model = build()
        with disable_adapters(model):
            for dataset in datasets:
                add_distributions(
                    cache, comparison, model, dataset, rows=rows, backend=backend, run=run
                )
        run_on_main_process(cache.write)
    heldout = rows.heldout
    if heldout is not None:
        heldout = cache.attach_numbers(heldout)
    dataset = cache.attach_numbers(rows.dataset)
    return comparison, replace(rows, dataset=dataset, heldout=heldout)


def open_teacher_cache(
    comparison: TeacherComparison,
    rows: TrainingRows,
    *,
    cache_dir: str | None,
    precision: str,
) -> RowCache:
    """The file of the numbers that are kept of the teacher's distributions. Collective."""
    return open_row_cache(
        find_cache_folder(cache_dir) / "teacher_distributions",
        comparison.pretrained,
        precision,
        "packed" if rows.shape.packing else "padded",
        comparison.teacher.kept_as,
        str(comparison.vocab_size),
    )


def find_missing_keys(cache: RowCache, datasets: list[TokenDataset]) -> set[str]:
    """The keys of the rows that the cache lacks."""
    keys: set[str] = set()
    for dataset in datasets:
        keys |= {dataset.key(row) for row in cache.find_missing_rows(dataset)}
    return keys


@torch.no_grad()
def add_distributions(
    cache: RowCache,
    comparison: TeacherComparison,
    model: Transformer,
    dataset: TokenDataset,
    *,
    rows: TrainingRows,
    backend: Backend,
    run: Run,
) -> None:
    """Run the teacher over the rows that `cache` lacks, and add what is kept, on every rank."""
    keep = comparison.teacher.keep
    assert keep is not None
    measure = Measure(lambda logits_NV: keep(comparison.shared_logits(logits_NV)))
    batches = scoring_batches(
        dataset,
        cache.find_missing_rows(dataset),
        shape=rows.shape,
        dp_process_group=backend.dp_process_group,
        console=run.console,
        title="teacher's distributions",
    )
    for batch in batches:
        scores = token_logprobs(model, batch.packed, device=backend.device, measure=measure)
        assert scores.measured_N is not None
        kept_NC = scores.measured_N.float().cpu()
        lengths = dataset.num_label_tokens[list(batch.row_ids)].tolist()
        values_by_key: dict[str, np.ndarray] = {}
        for row, values_NC in zip(batch.row_ids, kept_NC.split(lengths), strict=True):
            values_by_key[dataset.key(row)] = values_NC.numpy()
        for rank_values in gather_objects(values_by_key, backend.dp_process_group):
            for key, row_values_NC in rank_values.items():
                cache.add(key, row_values_NC)
    reshard(model)
