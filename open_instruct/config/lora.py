"""The flags of low-rank adapters (LoRA), and the checks between them and other flags."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.sections import flag, resumable_flag

# The matrices of a block by the names that peft's `target_modules` and config files have for them.
MODULES_OF_TARGETS = {
    "q_proj": "attention.w_q",
    "k_proj": "attention.w_k",
    "v_proj": "attention.w_v",
    "o_proj": "attention.w_out",
    "gate_proj": "feed_forward.w1",
    "down_proj": "feed_forward.w2",
    "up_proj": "feed_forward.w3",
}
ALL_LINEAR = "all-linear"
# The matrices of a block that are held in 4 bits, so many values of a row to a scale. Of layers of
# the gated delta rule all but the two of a row a head, `w_a` and `w_b`, which say how fast it
# forgets and writes.
IN_4_BITS = (*MODULES_OF_TARGETS.values(), "attention.w_qkv", "attention.w_g", "attention.w_output")
# By the ends of OLMo-core's names.
MATRICES_IN_4_BITS = tuple(f".{each}.weight" for each in IN_4_BITS)
BLOCK = 64
# Ranks of adapters that a vLLM engine supports.
RANKS_OF_ENGINES = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(kw_only=True)
class LoRASection:
    """Low-rank adapters, trained in place of the model."""

    title: ClassVar[str] = "Low-rank adapters"

    section_requirement: ClassVar[str] = "use_lora"

    use_lora: bool = flag(
        "train low-rank adapters beside the matrices of the blocks, and nothing else", False
    )
    use_qlora: bool = flag(
        "hold the matrices of the blocks in 4 bits (NF4), whether they get an adapter or not", False
    )
    lora_r: int = flag("rank of the adapters", 16, minimum=1)
    lora_alpha: float = flag(
        "the product of an adapter's matrices is scaled by this / rank", 32.0, above=0
    )
    use_rslora: bool = flag("scale by --lora_alpha / root of the rank instead", False)
    lora_dropout: float = flag("dropout of an adapter's inputs", 0.0, minimum=0, below=1)
    lora_target_modules: list[str] = flag(
        "matrices of a block that get an adapter",
        [ALL_LINEAR],
        choices=(*MODULES_OF_TARGETS, ALL_LINEAR),
    )
    lora_init: Literal["kaiming", "gaussian"] = flag(
        "distribution of an adapter's first matrix; its second begins at zero", "kaiming"
    )
    adapter_name_or_path: str | None = flag(
        "folder of a peft adapter to go on from", None, is_path=True
    )
    export: Literal["both", "merged", "adapter"] = resumable_flag(
        "'merged' into hf_model, the 'adapter' by itself as peft writes it, or both", "both"
    )

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732, section 3)."""
        return self.lora_alpha / (math.sqrt(self.lora_r) if self.use_rslora else self.lora_r)

    @property
    def targets(self) -> tuple[str, ...]:
        """The adapted matrices by peft's names, in the order of a block."""
        wanted_names = (
            MODULES_OF_TARGETS
            if ALL_LINEAR in self.lora_target_modules
            else self.lora_target_modules
        )
        return tuple(name for name in MODULES_OF_TARGETS if name in wanted_names)
