"""The reference policy that a KL penalty measures against: sharded as the policy, never a copy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.config.sections import ModelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.models.hf.names import clean_name
from open_instruct.models.load import stream_load
from open_instruct.models.shards import local_part, reshard
from open_instruct.models.storages import list_module_tensors
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.parallelize import Parallelism, parallelize, plan_frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference policy; `update_freq` is None for one that never moves.

    One that never moves is the start model, and is built from its files again after a restart. One
    that moves is part of the checkpoints, see `checkpoint_parts.py`.
    """

    model: Transformer
    update_freq: int | None = None
    alpha: float = 1.0

    def activated(self) -> AbstractContextManager[None]:
        """Compute with the reference's weights inside the block. Collective; take no step."""
        return nullcontext()

    @torch.no_grad()
    def follow(self, policy: Transformer, *, step: int) -> None:
        """Move towards the policy, if it is time to.

        reference <- alpha * policy + (1 - alpha) * reference.

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

    def list_resident_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the reference; they may be the policy's own."""
        return list_module_tensors(self.model)

    def state(self) -> dict[str, Any]:
        """The weights by name, as a checkpoint has them; they share the reference's storage."""
        return {clean_name(name): tensor for name, tensor in self.model.state_dict().items()}


def build_replica(
    pretrained: Pretrained,
    parallelism: Parallelism,
    *,
    run: Run,
    flags: ModelSection,
    max_seq_length: int,
) -> Transformer:
    """Build the model without its weights; on a single device, in the compute dtype."""
    model = pretrained.build(init_device=flags.init_device)
    if run.layout.single_device:
        model = model.to(getattr(torch, flags.param_dtype))
    parallelize(model, parallelism)
    model.init_weights(max_seq_len=max_seq_length, device=run.process.device)
    return model


def build_reference(pretrained: Pretrained, *, run: Run, config: LearnerConfig) -> Transformer:
    """Build a frozen model, sharded as the policy is, and fill it from its files. Collective."""
    model = build_replica(
        pretrained,
        plan_frozen(run, config),
        run=run,
        flags=config.model,
        max_seq_length=config.data.max_seq_length,
    )
    stream_load(model, pretrained.files, pretrained.names)
    return model.requires_grad_(False).eval()
