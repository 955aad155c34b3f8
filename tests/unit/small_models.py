"""Models of every family that are small enough for a test of a second, with weights that no norm
hides.
"""

from functools import cache
from typing import Any, TypeVar

import torch
import transformers
from olmo_core.nn.transformer import Transformer

from open_instruct.core.families import FAMILIES
from open_instruct.models.attention.segments import Segments
from open_instruct.models.build import build_model
from open_instruct.models.transformer import SegmentTransformer

Model = TypeVar("Model", bound=Transformer)

CPU = torch.device("cpu")
VOCAB_SIZE = 89
WINDOW = 7


def hf_config(family: str, **fields: Any) -> transformers.PretrainedConfig:
    """A configuration with other `fields` than the usual."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    usual: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, **sizes, **heads}
    if FAMILIES[family].has_windows:
        usual["sliding_window"] = WINDOW
    if FAMILIES[family].default_head_dim is not None:
        usual["head_dim"] = 24
    if FAMILIES[family].delta is not None:
        usual |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        usual |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
        # What these layers read may be small before it is normalised, which enlarges its rounding.
        usual |= {"rms_norm_eps": 1e-3}
    if (expert_size := FAMILIES[family].expert_size) is not None:
        usual |= {"num_experts": 8, "num_experts_per_tok": 3, expert_size: 24}
    return getattr(transformers, FAMILIES[family].config_class)(**(usual | fields))


def with_random_weights(model: Model) -> Model:
    generator = torch.Generator().manual_seed(0)
    # Smaller where there are layers of the gated delta rule, for the same reason.
    std = 0.1 if any(name.endswith("A_log") for name, _ in model.named_parameters()) else 0.3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=std, generator=generator)
    return model


def new_model(family: str, **fields: Any) -> SegmentTransformer:
    model = build_model(hf_config(family, **fields))
    model.init_weights(device=CPU, max_seq_len=64)
    return with_random_weights(model)


random_model = cache(new_model)


def segments_of(lengths: tuple[int, ...]) -> Segments:
    """Documents of these lengths, which share nothing."""
    return Segments.from_lengths(lengths, (0,) * len(lengths), device=CPU)
