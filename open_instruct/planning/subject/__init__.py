"""The subject of a plan: the shapes of a model, the work of one step, and the GPUs."""
