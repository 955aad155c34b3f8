"""The families of models, and what tells one from another; the rest of a model stands in its config.json.

Whatever reads, builds, plans or makes a checkpoint asks here.
"""

from dataclasses import dataclass
from typing import Any, Literal

from open_instruct.errors import InputError

QKNorm = Literal["none", "head", "full"]
LAYERS_OF_A_PATTERN = 4
MAX_EXPERTS = 4096  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of Hugging Face models.

    Attributes:
        name: what people call it.
        config_class: the class in transformers that describes it.
        norm_after: whether a block normalises the output of a sublayer, not its input.
        qk_norm: what the query-key norm spans: nothing, each head by itself, or all of them.
        in_float32: whether the norm's weight is multiplied, and RoPE applied, before rounding to the model's dtype.
        qkv_bias: whether queries, keys and values have a bias each; nothing else ever does.
        has_windows: whether config.json may give layers a sliding window (`layer_types`).
        default_head_dim: of a config.json that gives none; None: hidden_size / num_attention_heads.
        expert_size: the field of config.json that gives the width of an expert; None: every MLP is dense.

    Example: the queries and keys of Qwen 3 are normalised head by head, and its heads may be of any size::

        Family(name="Qwen 3", config_class="Qwen3Config", qk_norm="head", default_head_dim=128)
    """

    name: str
    config_class: str
    qk_norm: QKNorm
    norm_after: bool = False
    in_float32: bool = False
    qkv_bias: bool = False
    has_windows: bool = False
    default_head_dim: int | None = None
    expert_size: str | None = None

    def is_sparse(self, hf_config: Any, layer: int) -> bool:
        """Whether the MLP of a layer is many experts, a few of which compute each token."""
        if self.expert_size != "moe_intermediate_size":  # without a size of its own there is no other MLP
            return self.expert_size is not None
        is_dense = layer in (getattr(hf_config, "mlp_only_layers", None) or ())
        return not is_dense and (layer + 1) % (getattr(hf_config, "decoder_sparse_step", 1) or 1) == 0

    def default_windows(self, num_layers: int, window: int | None) -> tuple[int | None, ...]:
        """The window of each layer where config.json names none: three layers with `window`, then one without."""
        if not self.has_windows:
            return (None,) * num_layers
        return tuple(None if (layer + 1) % LAYERS_OF_A_PATTERN == 0 else window for layer in range(num_layers))


# By the `model_type` of config.json.
FAMILIES = {
    "olmo2": Family(name="OLMo 2", config_class="Olmo2Config", qk_norm="full", norm_after=True, in_float32=True),
    "olmo3": Family(
        name="OLMo 3", config_class="Olmo3Config", qk_norm="full", norm_after=True, in_float32=True, has_windows=True
    ),
    "qwen2": Family(name="Qwen 2.5", config_class="Qwen2Config", qk_norm="none", qkv_bias=True),
    "qwen3": Family(name="Qwen 3", config_class="Qwen3Config", qk_norm="head", default_head_dim=128),
    "qwen3_moe": Family(
        name="Qwen 3 MoE", config_class="Qwen3MoeConfig", qk_norm="head", expert_size="moe_intermediate_size"
    ),
    "olmoe": Family(name="OLMoE", config_class="OlmoeConfig", qk_norm="full", expert_size="intermediate_size"),
    "llama": Family(name="Llama 3", config_class="LlamaConfig", qk_norm="none"),
}


def family_of(model_type: Any, where: str = "config.json") -> Family:
    """The family of a `model_type`; raises InputError, which says `where` it was found, if there is none."""
    supported = ", ".join(f"{family.name} (model_type {name!r})" for name, family in FAMILIES.items())
    if model_type is None:
        raise InputError(f"{where} has no 'model_type'; supported families are {supported}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"{where}: model_type {model_type!r} is not supported; supported are {supported}")
    return FAMILIES[model_type]
