"""Builds OLMo-core models without weights: on meta, or filled with NaN until they are loaded."""

import torch
from transformers import PretrainedConfig

from open_instruct.models.family import build_transformer_config
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.models.hf.head_kinds import HEAD_SIZES, HEAD_TENSORS, LM_HEAD_BIAS, Head
from open_instruct.models.shards import find_local_shards
from open_instruct.models.transformer import SegmentTransformer


def build_model(
    hf_config: PretrainedConfig, *, init_device: str = "meta", head: Head = "vocabulary"
) -> SegmentTransformer:
    """Build the model of `hf_config`; `init_weights` or `parallelize_model` materialises it.

    Its `init_weights` allocates this rank's shards and fills them with NaN instead of drawing
    random numbers, so that a value that no checkpoint fills is detected.

    Args:
        hf_config: configuration of the checkpoint that will be loaded.
        init_device: "meta" builds without storage; "cpu" builds with real storage.
        head: the kind of head, see `Head`.

    Raises:
        InputError: the configuration is not supported.
    """
    config = build_transformer_config(hf_config)
    model = SegmentTransformer(
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        n_layers=config.n_layers,
        block=config.block,
        block_overrides=config.block_overrides,
        lm_head=config.lm_head,
        tie_word_embeddings=config.tie_word_embeddings and head == "vocabulary",
        init_device=init_device,
    )
    head_class = LogprobHead if head == "vocabulary" else ValueHead
    model.lm_head = head_class(
        d_model=config.d_model,
        vocab_size=HEAD_SIZES.get(head, config.vocab_size),
        layer_norm=config.lm_head.layer_norm,
        dtype=torch.float32,
        bias=LM_HEAD_BIAS in HEAD_TENSORS.get(head, {}),
        init_device=init_device,
    )
    if getattr(hf_config, "output_router_logits", False):
        model.balance_coefficient = hf_config.router_aux_loss_coef
    if model.tie_word_embeddings:
        model.lm_head.w_out.weight = model.embeddings.weight
    return model


@torch.no_grad()
def find_not_finite(model: torch.nn.Module) -> dict[str, str]:
    """The parameters of which this rank's shard is not finite, each with "NaN" or "inf".

    NaN is also the value where nothing was read.
    """
    not_finite = {}
    for name, shard in find_local_shards(model).items():
        values = shard.values_to_check
        if values.numel() == 0:
            continue
        # aminmax propagates NaN, and needs no mask of the tensor's size.
        ends = torch.stack(values.aminmax())
        if bool(ends.isfinite().all()):
            continue
        has_nan = bool(ends.isnan().any())
        not_finite[name] = "NaN" if has_nan else "inf"
    return not_finite
