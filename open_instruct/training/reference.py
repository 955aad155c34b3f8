"""The frozen models beside the policy: the reference that a KL penalty measures against, and a
teacher.

Each is sharded as the policy is, never a full copy, and built from its files.

The matrix of the teacher's head is gathered once and stays: the policy's head multiplies with it
chunk by chunk, in the forward and again in the backward pass, when the teacher's own parameters
have long been shards again.

Legend: N labelled tokens, V vocabulary, D width of the teacher, C numbers kept of a distribution.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module.transformer.common import parallelize_model

from open_instruct.config.lora import LoRASection
from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.core.batch_values import TeacherValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Batch
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.hf.names import clean_name
from open_instruct.models.load import stream_load
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.models.shards import local_part, reshard
from open_instruct.objectives.objective import Teacher
from open_instruct.parallel.data_parallel import mesh_of, parallel_configs
from open_instruct.parallel.status import this_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.run.run_directory import RunDirectory
from open_instruct.training.model.forward import beside_labels, hidden_at_labels
from open_instruct.training.model.kernels import compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference policy, sharded as the policy is. `update_freq` is None for one that is never
    updated.

    A reference that is never updated is the start model, and is built from its files again after a
    restart. A reference that moves is saved in the checkpoints, beside the policy and the
    optimizer.
    """

    model: Transformer
    update_freq: int | None = None
    alpha: float = 1.0

    def in_place(self) -> AbstractContextManager[None]:
        """Within, `model` computes with the reference's weights. Collective; take no step."""
        return nullcontext()

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        """Move towards the policy, if it is time to: reference <- alpha * policy + (1 - alpha) *
        reference.

        Every rank averages its own shards. Both models are resharded first: FSDP leaves the root's
        parameters gathered after a forward pass, and an average of the gathered copies would not
        reach the shards.
        """
        if self.update_freq is None or step % self.update_freq:
            return
        reshard(self.model)
        reshard(policy)
        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_part(ours).lerp_(local_part(theirs).to(ours.dtype), self.alpha)

    def state(self) -> dict[str, Any]:
        """The weights by name, as a checkpoint holds them; they share storage with the reference's
        own.
        """
        return {clean_name(name): tensor for name, tensor in self.model.state_dict().items()}


def build_replica(
    pretrained: Pretrained, *, run: Run, config: LearnerConfig, **kernels: Any
) -> Transformer:
    """Build the model under the policy's own mesh; on a single device, in the compute dtype.

    `kernels`: OLMo-core's configs of activation checkpointing and of float8 products; default:
    neither.
    """
    model = pretrained.build(init_device=config.model.init_device)
    model.splits_experts = run.layout.expert_parallel_degree > 1
    model.on_host = config.parallel.offload
    is_compiled = compiles(config.memory, layout=run.layout, device=run.process.device)
    model.compiles_on_cpu = is_compiled and run.process.device.type == "cpu"
    if run.layout.single_device:
        model = model.to(getattr(torch, config.model.param_dtype))
    return parallelize_model(
        model,
        world_mesh=mesh_of(run.layout, run.process.device),
        compile_model=is_compiled and run.process.device.type == "cuda",
        **kernels,
        **sharding(run, config),
    )


def sharding(run: Run, config: LearnerConfig) -> dict[str, Any]:
    """The arguments that OLMo-core shards a model by: the same for the policy and for each model
    beside it.
    """
    configs = parallel_configs(
        run.layout,
        param_dtype=config.model.param_dtype,
        prefetch_factor=config.parallel.fsdp_prefetch_factor,
    )
    return {
        "device": run.process.device,
        "max_sequence_length": config.data.max_seq_length,
        "rank_microbatch_size": config.data.max_seq_length,
        **{f"{kind}_config": of_kind for kind, of_kind in configs.items()},
    }


def build_reference(pretrained: Pretrained, *, run: Run, config: LearnerConfig) -> Transformer:
    """A second copy of the start model under the policy's own mesh, without gradients and without
    an optimizer.

    Call it after the policy is built, as it takes the policy's mesh.
    """
    model = build_replica(pretrained, run=run, config=config)
    stream_load(model, pretrained.files, pretrained.names)
    return model.requires_grad_(False).eval()


def open_beside(
    kind: Literal["teacher", "critic"],
    name: str | None,
    student: Pretrained,
    *,
    config: LearnerConfig,
    layout: ShardLayout,
) -> Pretrained:
    """Open the model of --KIND_model_name_or_path, to stand beside the policy; without a `name` the
    start model.

    A critic is trained, and has the head of a score. `build_teacher` builds a teacher.

    :raises InputError: it cannot be opened, or its vocabulary is not the student's.
    """
    model, directory = config.model, RunDirectory(path=Path(config.run.output_dir))
    if name is not None:
        model = replace(model, model_name_or_path=name, tokenizer_name_or_path=None)
    config = replace(config, model=model, lora=LoRASection())
    if kind == "critic":
        beside = open_pretrained(config, directory.critic, layout=layout, head="score")
    else:
        # A teacher may be dense: its experts are split where they divide, see
        # `SegmentTransformer.apply_fsdp`.
        layout = replace(layout, expert_parallel_degree=1)
        beside = open_pretrained(config, directory.hf_model, layout=layout, is_trained=False)
    ours, theirs = student.tokenizer.get_vocab(), beside.tokenizer.get_vocab()
    if ours == theirs:
        return beside
    first = min(
        dict(ours.items() ^ theirs.items()),
        key=lambda word: min(ours.get(word, 1e9), theirs.get(word, 1e9)),
    )
    there, here = (
        f"id {words[first]}" if first in words else "no token" for words in (theirs, ours)
    )
    raise InputError(
        f"--{kind}_model_name_or_path {beside.folder}: its tokenizer has {len(theirs):,} tokens "
        f"(its head {beside.hf_config.vocab_size:,} rows), the student's {len(ours):,} (its head "
        f"{student.hf_config.vocab_size:,}), and they are not the same: {first!r} is {there} "
        f"there and {here} here. Take a {kind} with the student's vocabulary",
        kind="conflict",
    )


def build_teacher(
    teacher: Pretrained,
    student: Pretrained,
    policy: Transformer,
    *,
    run: Run,
    config: LearnerConfig,
) -> Transformer:
    """Build the model that `open_beside` opened. Collective.

    Where the teacher is the `student`'s start model and the student only trains adapters, the
    result is `policy` itself; call it within `adapters_off`.
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
class Comparison:
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
    def of(
        cls, teacher: Teacher, student: Pretrained, *, config: TrainingConfig, layout: ShardLayout
    ) -> Self:
        """Open the teacher's checkpoint with `open_beside`; `model` comes later.

        :raises InputError: also where --teacher_top_k is not smaller than the vocabulary.
        """
        pretrained = open_beside(
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
        """The `Measure` that a forward pass of `policy` over a microbatch computes of its
        logits.
        """
        if self.model is None:
            num_labels = len(batch.packed.sequence_ids_N)
            stored = TeacherValues.read(batch.values).stored_numbers
            assert stored is not None, "rows carry what is stored where there is no model"
            kept_NC = stored.view(num_labels, -1 if num_labels else 1)
            return Measure(
                self.compare_kept, (beside_labels(policy, batch.packed, kept_NC, device=device),)
            )
        with torch.no_grad(), adapters_off(self.model):
            hidden_BKD = hidden_at_labels(self.model, batch.packed, policy, device)
        # A forward pass without a backward leaves FSDP's root parameters gathered.
        reshard(self.model)
        return Measure(self.compare_logits, (hidden_BKD,))

    def compare_kept(self, logits_NV: torch.Tensor, kept_NC: torch.Tensor) -> torch.Tensor:
        return self.teacher.compare(self.shared_logits(logits_NV), kept_NC)

    def compare_logits(self, logits_NV: torch.Tensor, hidden_ND: torch.Tensor) -> torch.Tensor:
        assert self.head_VD is not None
        teacher_NV = F.linear(hidden_ND, self.head_VD).float()
        return self.teacher.compare(self.shared_logits(logits_NV), self.shared_logits(teacher_NV))
