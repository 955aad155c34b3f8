"""The frozen models beside the policy: the reference that a KL penalty measures against, and a teacher.

Each is sharded as the policy is, never a full copy, and built from its files.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from open_instruct.config.lora import LoRASection
from open_instruct.config.training import LearnerConfig
from open_instruct.errors import InputError
from open_instruct.learner.model.replica import build_replica
from open_instruct.models.load import stream_load
from open_instruct.models.shards import local_part, reshard
from open_instruct.parallel.peers import doing
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.run.run_directory import RunDirectory
from open_instruct.shard_layout import ShardLayout

# The key of a moving reference policy in a checkpoint.
IN_CHECKPOINT = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference policy, sharded as the policy is. `update_freq` is None for one that is never updated.

    A reference that is never updated is the start model, and is built from its files again after a restart. A reference
    that moves is saved in the checkpoints, beside the policy and the optimizer.
    """

    model: Transformer
    update_freq: int | None = None
    alpha: float = 1.0

    def in_place(self) -> AbstractContextManager[None]:
        """Within, `model` computes with the reference's weights. Collective; take no step."""
        return nullcontext()

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        """Move towards the policy, if it is time to: reference <- alpha * policy + (1 - alpha) * reference.

        Every rank averages its own shards. Both models are resharded first: FSDP leaves the root's parameters gathered
        after a forward pass, and an average of the gathered copies would not reach the shards.
        """
        if self.update_freq is None or step % self.update_freq:
            return
        reshard(self.model)
        reshard(policy)
        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            local_part(ours).lerp_(local_part(theirs).to(ours.dtype), self.alpha)

    def state_to_save(self, options: StateDictOptions) -> dict[str, Any]:
        if self.update_freq is None:
            return {}
        return {IN_CHECKPOINT: get_model_state_dict(self.model, options=options)}

    def state_to_load(self, metadata: Metadata, options: StateDictOptions) -> dict[str, Any]:
        is_there = any(name.startswith(f"{IN_CHECKPOINT}.") for name in metadata.state_dict_metadata)
        return self.state_to_save(options) if is_there else {}

    def load(self, state: dict[str, Any], options: StateDictOptions) -> None:
        if self.update_freq is not None and IN_CHECKPOINT in state:
            set_model_state_dict(self.model, state[IN_CHECKPOINT], options=options)


def build_reference(pretrained: Pretrained, *, run: Run, config: LearnerConfig) -> Transformer:
    """A second copy of the start model under the policy's own mesh, without gradients and without an optimizer.

    Call it after the policy is built, as it takes the policy's mesh.
    """
    model = build_replica(pretrained, run=run, config=config)
    stream_load(model, pretrained.files, pretrained.names)
    return model.requires_grad_(False).eval()


def open_teacher(name: str, student: Pretrained, *, config: LearnerConfig, layout: ShardLayout) -> Pretrained:
    """Open the model of --teacher_model_name_or_path; `build_teacher` builds it.

    :raises InputError: it cannot be opened, or its vocabulary is not the student's.
    """
    model = replace(config.model, model_name_or_path=name, tokenizer_name_or_path=None)
    folder = RunDirectory(path=Path(config.run.output_dir)).hf_model
    # A teacher may be dense: its experts are split where they divide, see `SegmentTransformer.apply_fsdp`.
    layout = replace(layout, expert_parallel_degree=1)
    teacher = open_pretrained(replace(config, model=model, lora=LoRASection()), folder, layout=layout)
    ours, theirs = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if ours == theirs:
        return teacher
    first = min(dict(ours.items() ^ theirs.items()), key=lambda word: min(ours.get(word, 1e9), theirs.get(word, 1e9)))
    there, here = (f"id {words[first]}" if first in words else "no token" for words in (theirs, ours))
    raise InputError(
        f"--teacher_model_name_or_path {teacher.folder}: its tokenizer has {len(theirs):,} tokens (its head "
        f"{teacher.hf_config.vocab_size:,} rows), the student's {len(ours):,} (its head "
        f"{student.hf_config.vocab_size:,}), and they are not the same: {first!r} is {there} there and {here} here. "
        "Take a teacher with the student's vocabulary"
    )


def build_teacher(
    teacher: Pretrained, student: Pretrained, policy: Transformer, *, run: Run, config: LearnerConfig
) -> Transformer:
    """Build the model that `open_teacher` opened. Collective.

    Where the teacher is the `student`'s start model and the student only trains adapters, the result is `policy`
    itself; call it within `adapters_off`.
    """
    doing("loading the teacher")
    if config.adapters is not None and teacher.is_same_as(student):
        run.console.say("the teacher is the start model: the policy with its adapters off, so no second one is loaded")
        return policy
    model = build_reference(teacher, run=run, config=config)
    run.console.say(f"loaded the teacher ({model.num_params / 1e6:,.1f}M parameters)")
    return model
