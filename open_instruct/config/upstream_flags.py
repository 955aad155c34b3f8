"""Flags of other trainers in this lineage: those that are taken for ours, and those that mean nothing here."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml

SYNONYMS: dict[str, str] = {
    **dict.fromkeys(("sequence_parallel_size", "ring_attn_size"), "context_parallel_degree"),
    "ds_tensor_parallel_size": "tensor_parallel_degree",
    "max_norm": "max_grad_norm",
    "advantages": "advantage_normalization_type",
    "zero_stage": "deepspeed_stage",
    "lora_rank": "lora_r",
    **dict.fromkeys(("zpg", "zero_hpz_partition_size"), "deepspeed_zpg"),
    **dict.fromkeys(("offload_optimizer", "deepspeed_offload_optimizer"), "adam_offload"),
    **dict.fromkeys(("offload_param", "deepspeed_offload_param"), "offload"),
}
"""Other names of flags, theirs and shorter ones."""


@cache
def upstream_flags() -> dict[str, str]:
    """Of each flag that means nothing here, the sentence in upstream_flags.yaml that says so."""
    table = yaml.safe_load((files("open_instruct.config") / "upstream_flags.yaml").read_text(encoding="utf-8"))
    return {name: sentence for names, sentence in table.items() for name in names.split(", ")}
