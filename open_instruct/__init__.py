"""Post-training (DPO, GRPO) of open language models on OLMo-core, sharded as HSDP."""

__version__ = "0.1.0"
