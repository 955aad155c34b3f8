"""Talk to a model that a run has left."""
