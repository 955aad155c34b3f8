"""OLMo-core's own checkpoints: their config.json, and weights in torch's distributed format."""
