"""Builds OLMo-core models without weights: on the meta device, or filled with NaN until a checkpoint is read."""

from __future__ import annotations

import types
from typing import cast

import torch
from olmo_core.nn.attention import Attention
from olmo_core.nn.transformer import Transformer, TransformerConfig
from olmo_core.utils import get_default_device
from torch.distributed import DeviceMesh
from transformers import PretrainedConfig

from open_instruct.models.attention.attention import install_segment_attention
from open_instruct.models.attention.context_parallel import apply_context_parallel
from open_instruct.models.attention.segments import install_segments
from open_instruct.models.compiled import apply_compile
from open_instruct.models.family import transformer_config
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.models.heads.value_head import ValueHead, apply_fsdp
from open_instruct.models.hf.names import Head
from open_instruct.models.on_cpu.products import install_products
from open_instruct.models.shards import held_of, local_part


def build_model(hf_config: PretrainedConfig, *, init_device: str = "meta", head: Head = "vocabulary") -> Transformer:
    """The model of `hf_config`, to be materialised by OLMo-core's `parallelize_model` (or `materialize`).

    Its `init_weights` allocates this rank's shards and fills them with NaN instead of drawing random
    numbers, so that a value that no checkpoint fills is detected.

    Args:
        hf_config: configuration of the checkpoint that will be loaded.
        init_device: "meta" builds without storage; "cpu" builds with real storage.
        head: the kind of head, see `Head`.

    Raises:
        InputError: the configuration is not supported.
    """
    config = transformer_config(hf_config)
    if head == "score":
        config.tie_word_embeddings = False
    model = config.build(init_device=init_device)
    for block in model.blocks.values():
        # OLMo-core has a bias on all four projections or on none; no family has one here.
        cast(Attention, block.attention).w_out.register_parameter("bias", None)
    install_segment_attention(model)
    install_segments(model)
    install_head(model, config, head, init_device=init_device)
    install_products(model)
    # OLMo-core calls the model's init_weights once it is sharded; ours replaces it.
    model.init_weights = types.MethodType(materialize, model)  # type: ignore[method-assign]
    model.apply_compile = types.MethodType(apply_compile, model)  # type: ignore[method-assign]
    model.apply_cp = types.MethodType(apply_context_parallel, model)  # type: ignore[method-assign]
    return model


def install_head(model: Transformer, config: TransformerConfig, head: Head, *, init_device: str) -> None:
    """Give `model`, before it is sharded, a head of ours in place of the one it was built with."""
    head_class, num_outputs = (ValueHead, 1) if head == "score" else (LogprobHead, config.vocab_size)
    model.lm_head = head_class(
        d_model=config.d_model,
        vocab_size=num_outputs,
        layer_norm=config.lm_head.layer_norm,
        dtype=torch.float32,
        bias=False,
        init_device=init_device,
    )
    if head == "score":
        model.apply_fsdp = types.MethodType(apply_fsdp, model)  # type: ignore[method-assign]
    if model.tie_word_embeddings:
        model._tie_weights()


@torch.no_grad()
def materialize(
    model: Transformer,
    *,
    max_seq_len: int | None = None,
    max_local_microbatch_size: int | None = None,
    device: torch.device | None = None,
    world_mesh: DeviceMesh | None = None,
    model_part_idx: int = 0,
) -> None:
    """Allocate the local shards of `model` on `device`, hold NaN in all of them, and warm up RoPE.

    Takes the arguments of OLMo-core's `Transformer.init_weights`. No collective is entered.
    """
    del max_local_microbatch_size, world_mesh, model_part_idx
    # Not model.device: OLMo-core caches the property's first value, which would be "meta".
    device = device or get_default_device()
    model.to_empty(device=device)
    for parameter in model.parameters():
        local_part(parameter).fill_(float("nan"))
    if model.tie_word_embeddings:
        model._tie_weights()  # to_empty gave the tied head and embeddings separate storage
    warm_up_rope(model, max_seq_len=max_seq_len, device=device)


def warm_up_rope(model: Transformer, *, max_seq_len: int | None, device: torch.device) -> None:
    if max_seq_len is not None:
        for block in model.blocks.values():
            rope = cast(Attention, block.attention).rope
            if rope is not None:
                rope.warmup_cache(max_seq_len, device)


@torch.no_grad()
def find_not_finite(model: torch.nn.Module) -> dict[str, str]:
    """The parameters with a value that is not finite in this rank's shard, and that value: "NaN" or "inf".

    NaN is also the value where nothing was read.
    """
    not_finite = {}
    for name, held in held_of(model).items():
        local = held.local
        if local.numel() == 0:
            continue
        # aminmax propagates NaN, and needs no mask of the tensor's size.
        ends = torch.stack(local.aminmax())
        if not bool(ends.isfinite().all()):
            not_finite[name] = "NaN" if bool(ends.isnan().any()) else "inf"
    return not_finite
