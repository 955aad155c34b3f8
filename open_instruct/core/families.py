"""The families of models, and what tells one from another; the rest of a model stands in its
config.json.

Whatever reads, builds, plans or makes a checkpoint asks here.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from open_instruct.core.errors import InputError

QKNorm = Literal["none", "head", "full"]
DeltaLayers = Literal["fused", "apart"]
LAYERS_OF_A_PATTERN = 4
MAX_EXPERTS = 4096  # of a layer
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""What a config.json's `layer_types` names; the last are layers of the gated delta rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of Hugging Face models.

    Attributes:
        name: what people call it.
        config_class: the class in transformers that describes it.
        norm_after: whether a block normalises the output of a sublayer, not its input.
        qk_norm: what the query-key norm spans: nothing, each head by itself, or all of them.
        in_float32: whether the norm's weight is multiplied, and RoPE applied, before rounding to
            the model's dtype.
        qkv_bias: whether queries, keys and values have a bias each; nothing else ever does.
        has_windows: whether config.json may give layers a sliding window (`layer_types`).
        has_window_switch: whether `sliding_window` is read with `use_sliding_window: true` alone,
            which is refused.
        delta: whether config.json gives layers of the gated delta rule (`layer_types`), with their
            norms before them: queries, keys and values come from one matrix, or from a matrix each.
        delta_norm_eps: of the norm of what these layers read; None: `rms_norm_eps`.
        delta_may_negate: whether config.json may double their rates of writing
            (`linear_allow_neg_eigval`).
        gates_attention: whether `q_proj` gives a gate beside each query, which attention's output
            is multiplied by.
        norms_from_zero: whether the weight of a norm is stored less one, and multiplied before
            rounding.
        turned_share: of a head, that RoPE turns if config.json has no `partial_rotary_factor`;
            None: always all.
        may_not_turn: whether config.json may have no RoPE (`rope_theta` null).
        forces_tokenizer: whether transformers 5 opens every tokenizer beside the model as
            Qwen2Tokenizer.
        engine_needs: a package that vLLM's model of the family imports, and that vLLM does not
            bring along.
        default_head_dim: of a config.json that gives none; None: hidden_size / num_attention_heads.
        expert_size: the field of config.json that gives the width of an expert; None: every MLP is
            dense.
        heads_without_class: the kinds of heads (`models.hf.head_kinds.Head`) that transformers has
            no class of the family for, so that a model trained with one could not be opened.

    Example: the queries and keys of Qwen 3 are normalised head by head, and its heads may be of any
    size::

        Family(name="Qwen 3", config_class="Qwen3Config", qk_norm="head", default_head_dim=128)
    """

    name: str
    config_class: str
    qk_norm: QKNorm
    norm_after: bool = False
    in_float32: bool = False
    qkv_bias: bool = False
    has_windows: bool = False
    has_window_switch: bool = False
    delta: DeltaLayers | None = None
    delta_norm_eps: float | None = None
    delta_may_negate: bool = False
    gates_attention: bool = False
    norms_from_zero: bool = False
    turned_share: float | None = None
    may_not_turn: bool = False
    forces_tokenizer: bool = False
    engine_needs: str | None = None
    default_head_dim: int | None = None
    expert_size: str | None = None
    heads_without_class: tuple[str, ...] = ()

    def is_sparse(self, hf_config: Any, layer: int) -> bool:
        """Whether the MLP of a layer is many experts, a few of which compute each token."""
        # Without a size of its own there is no other MLP.
        if self.expert_size != "moe_intermediate_size":
            return self.expert_size is not None
        is_dense = layer in (getattr(hf_config, "mlp_only_layers", None) or ())
        return (
            not is_dense and (layer + 1) % (getattr(hf_config, "decoder_sparse_step", 1) or 1) == 0
        )

    def layer_types(
        self, given_types: Any, num_layers: int, where: str = "config.json"
    ) -> list[str]:
        """The type of each layer: `given_types`, or without them three of the family's own and one
        `FULL` in turn.

        Raises:
            InputError: what is given are no types of this family, or not as many; `where` stands in
                it.
        """
        usual = FULL if self.delta is None else LINEAR
        if self.has_windows:
            usual = SLIDING
        if given_types is None:
            pattern = [usual] * (LAYERS_OF_A_PATTERN - 1) + [FULL]
            return [pattern[layer % LAYERS_OF_A_PATTERN] for layer in range(num_layers)]
        if not isinstance(given_types, list) or len(given_types) != num_layers:
            raise InputError(
                f"{where}: layer_types is no list of num_hidden_layers = {num_layers} entries",
                kind="bad_model",
            )
        for layer, layer_type in enumerate(given_types):
            if layer_type not in (FULL, usual):
                supported = " or ".join(map(repr, dict.fromkeys((FULL, usual))))
                problem = f"layer_types[{layer}] = {layer_type!r} is not supported for {self.name}"
                raise InputError(
                    f"{where}: {problem}; supported: {supported}", kind="unsupported_model"
                )
        return given_types


OLMO2 = Family(
    name="OLMo 2",
    config_class="Olmo2Config",
    qk_norm="full",
    norm_after=True,
    in_float32=True,
    heads_without_class=("classes",),
)
# By the `model_type` of config.json.
FAMILIES = {
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, name="OLMo 3", config_class="Olmo3Config", has_windows=True),
    "qwen2": Family(
        name="Qwen 2.5",
        config_class="Qwen2Config",
        qk_norm="none",
        qkv_bias=True,
        has_window_switch=True,
        forces_tokenizer=True,
    ),
    "qwen3": Family(
        name="Qwen 3",
        config_class="Qwen3Config",
        qk_norm="head",
        default_head_dim=128,
        has_window_switch=True,
    ),
    "qwen3_moe": Family(
        name="Qwen 3 MoE",
        config_class="Qwen3MoeConfig",
        qk_norm="head",
        expert_size="moe_intermediate_size",
        has_window_switch=True,
    ),
    "olmoe": Family(
        name="OLMoE",
        config_class="OlmoeConfig",
        qk_norm="full",
        expert_size="intermediate_size",
        heads_without_class=("score", "classes"),
    ),
    "llama": Family(name="Llama 3", config_class="LlamaConfig", qk_norm="none"),
    "olmo_hybrid": replace(
        OLMO2,
        name="Olmo-Hybrid",
        config_class="OlmoHybridConfig",
        may_not_turn=True,
        delta="apart",
        heads_without_class=("score", "classes"),
        delta_norm_eps=1e-5,
        delta_may_negate=True,
    ),
    "qwen3_5_text": Family(
        name="Qwen 3.5 (text)",
        config_class="Qwen3_5TextConfig",
        qk_norm="head",
        default_head_dim=256,
        gates_attention=True,
        norms_from_zero=True,
        turned_share=0.25,
        engine_needs="torchvision",
        delta="fused",
        heads_without_class=("classes",),
    ),
}

REMEDIES = {
    "qwen3_5": "its text part is: write that with transformers, "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder), copy the "
    "tokenizer's files, start there"
}


def find_model_type(*, norm_after: bool, qk_norm: QKNorm, has_windows: bool) -> str | None:
    """The `model_type` of the family with these traits, all of whose layers are attention without
    biases and a dense MLP; None if there is none.
    """
    traits = (norm_after, qk_norm, has_windows)
    for model_type, family in FAMILIES.items():
        is_plain = not (family.qkv_bias or family.expert_size or family.delta)
        if is_plain and (family.norm_after, family.qk_norm, family.has_windows) == traits:
            return model_type
    return None


def find_family(model_type: Any, where: str = "config.json") -> Family:
    """The family of a `model_type`; raises InputError, which says `where` it was found, if there is
    none.
    """
    supported = ", ".join(
        f"{family.name} (model_type {name!r})" for name, family in FAMILIES.items()
    )
    if model_type is None:
        raise InputError(
            f"{where} has no 'model_type'; supported families are {supported}", kind="bad_model"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        remedy = REMEDIES.get(str(model_type), f"supported are {supported}")
        raise InputError(
            f"{where}: model_type {model_type!r} is not supported; {remedy}",
            kind="unsupported_model",
        )
    return FAMILIES[model_type]
