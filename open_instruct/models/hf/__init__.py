"""Hugging Face checkpoints on disk: their configuration, files and names."""
