"""Attention over segments: within documents, and where a prompt is shared, split or on a CPU."""
