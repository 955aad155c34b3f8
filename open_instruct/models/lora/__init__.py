"""Low-rank adapters: in the model, and on disk."""
