"""A vLLM engine, the pool of engines, and their requests."""
