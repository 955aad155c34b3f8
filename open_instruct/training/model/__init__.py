"""OLMo-core's model, prepared for training, and its forward pass; the same for every backend."""
