"""What turns a model, a loader and a loss into a run."""
