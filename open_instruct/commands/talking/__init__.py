"""Models to talk to, and what answers for them where there is no vLLM."""
