"""Hugging Face checkpoints as OLMo-core models, streamed in and out of shards."""
