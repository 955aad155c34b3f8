"""One command that says what of this package works on a machine's GPU, and how fast: docs/gpu.md."""
