"""Causal attention over packed documents, also with shared prompts, split rows, and on CPUs."""
