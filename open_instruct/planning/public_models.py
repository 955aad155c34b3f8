"""The shapes of public models by their names on the Hugging Face hub, so that a plan downloads nothing.

From the config.json that each was released with. All are taken to be stored in 16 bits, as the tuned ones are; for
another dtype, or a shape of one's own, give the folder or its config.json.
"""

from __future__ import annotations

import re

from open_instruct.families import FAMILIES
from open_instruct.planning.model_shape import ModelShape

OLMO3_WINDOW = 4096

# family: (d_model, d_ff, layers, heads, kv heads, head dim, vocabulary, tied)
_Size = tuple[str, int, int, int, int, int, int, int, bool]
PUBLIC: dict[str, _Size] = {
    "allenai/OLMo-2-0425-1B": ("olmo2", 2048, 8192, 16, 16, 16, 128, 100352, False),
    "allenai/OLMo-2-1124-7B": ("olmo2", 4096, 11008, 32, 32, 32, 128, 100352, False),
    "allenai/OLMo-2-1124-13B": ("olmo2", 5120, 13824, 40, 40, 40, 128, 100352, False),
    "allenai/OLMo-2-0325-32B": ("olmo2", 5120, 27648, 64, 40, 8, 128, 100352, False),
    "allenai/Olmo-3-1025-7B": ("olmo3", 4096, 11008, 32, 32, 32, 128, 100278, False),
    "allenai/Olmo-3-1125-32B": ("olmo3", 5120, 27648, 64, 40, 8, 128, 100278, False),
    "allenai/Olmo-3.1-32B": ("olmo3", 5120, 27648, 64, 40, 8, 128, 100278, False),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "meta-llama/Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "meta-llama/Llama-3-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    "meta-llama/Llama-3.1-405B": ("llama", 16384, 53248, 126, 128, 8, 128, 128256, False),
    "meta-llama/Llama-3.3-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
}

# Words of a name that say how a model was trained or when, not how large it is.
_VARIANT = re.compile(
    r"-(?:meta|base|pt|hf|sft|dpo|rlvr\d?|instruct|think|chat|rl|zero|math|code|if|general|mix|\d{4})(?=-)"
)


def public_names() -> tuple[str, ...]:
    return tuple(PUBLIC)


def find_public_model(name: str) -> ModelShape | None:
    """The built-in shape of a name, with or without its organisation, and of the tuned variants of the same size."""
    wanted = _size_of(name)
    for public, (family, *sizes, is_tied) in PUBLIC.items():
        if _size_of(public) == wanted:
            d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim, vocab_size = sizes
            return ModelShape(
                name=public,
                family=family,
                d_model=d_model,
                d_ff=d_ff,
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                vocab_size=vocab_size,
                is_tied=is_tied,
                qk_norm=FAMILIES[family].qk_norm,
                windows=FAMILIES[family].default_windows(num_layers, OLMO3_WINDOW),
            )
    return None


def _size_of(name: str) -> str:
    """`-olmo-3-7b-` of "allenai/Olmo-3-7B-Think-SFT" and of "Olmo-3-1025-7B"."""
    words = f"-{name.rpartition('/')[2].lower()}-"
    return _VARIANT.sub("", words)
