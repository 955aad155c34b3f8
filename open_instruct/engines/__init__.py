"""A vLLM engine, the pool of them, and what is asked of it."""
