"""Ray learners, vLLM engines, and what flows between them."""
