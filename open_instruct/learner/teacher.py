"""A frozen teacher beside the policy: a model sharded as the policy is, or numbers kept of its distributions.

The matrix of the teacher's head is gathered once and stays: the policy's head multiplies with it chunk by chunk, in the
forward and again in the backward pass, when the teacher's own parameters have long been shards again.

Legend: N labelled tokens, V vocabulary, D width of the teacher, C numbers kept of a distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer

from open_instruct.config.training import TrainingConfig
from open_instruct.errors import InputError
from open_instruct.learner.model.forward import beside_labels, hidden_at_labels
from open_instruct.learner.reference_policy import open_teacher
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.models.shards import reshard
from open_instruct.objectives.objective import Teacher
from open_instruct.records import ROW_VALUES, Batch
from open_instruct.run.pretrained import Pretrained
from open_instruct.shard_layout import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTeacher:
    """A teacher's checkpoint, checked. Both heads have `vocab_size` rows; where one has more, the rest is padding."""

    teacher: Teacher
    pretrained: Pretrained
    vocab_size: int

    @classmethod
    def of(cls, teacher: Teacher, student: Pretrained, *, config: TrainingConfig, layout: ShardLayout) -> OpenedTeacher:
        """Open the teacher's checkpoint with `open_teacher`.

        :raises InputError: also where --teacher_top_k is not smaller than the vocabulary.
        """
        pretrained = open_teacher(teacher.model_name_or_path, student, config=config, layout=layout)
        vocab_size = min(student.hf_config.vocab_size, pretrained.hf_config.vocab_size)
        if teacher.num_kept >= vocab_size:
            raise InputError(
                f"--teacher_top_k {teacher.num_kept}: the vocabulary has {vocab_size:,} tokens, of which fewer must be "
                "kept; leave it out to compare all of them"
            )
        return cls(teacher=teacher, pretrained=pretrained, vocab_size=vocab_size)

    def shared_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV[:, : self.vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A policy is compared with a teacher at every label.

    The teacher is a `model` with its head's matrix (`head_VD`, whole, in the compute dtype). Without a `model` the rows
    carry the numbers that were kept of the teacher's distributions.
    """

    opened: OpenedTeacher
    model: Transformer | None = None
    head_VD: torch.Tensor | None = None

    def measure(self, policy: Transformer, batch: Batch, *, device: torch.device) -> Measure:
        """The `Measure` that a forward pass of `policy` over a microbatch computes of its logits."""
        if self.model is None:
            num_labels = len(batch.packed.sequence_ids_N)
            kept_NC = batch.values[ROW_VALUES].view(num_labels, -1 if num_labels else 1)
            return Measure(self.compare_kept, (beside_labels(policy, batch.packed, kept_NC, device=device),))
        with torch.no_grad(), adapters_off(self.model):
            hidden_BKD = hidden_at_labels(self.model, batch.packed, policy, device)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        return Measure(self.compare_logits, (hidden_BKD,))

    def compare_kept(self, logits_NV: torch.Tensor, kept_NC: torch.Tensor) -> torch.Tensor:
        return self.opened.teacher.compare(self.opened.shared_logits(logits_NV), kept_NC)

    def compare_logits(self, logits_NV: torch.Tensor, hidden_ND: torch.Tensor) -> torch.Tensor:
        assert self.head_VD is not None
        teacher_NV = F.linear(hidden_ND, self.head_VD).float()
        return self.opened.teacher.compare(self.opened.shared_logits(logits_NV), self.opened.shared_logits(teacher_NV))
