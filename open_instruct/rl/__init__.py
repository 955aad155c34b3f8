"""The walk of a GRPO run: prompts and completions between vLLM engines and Ray learners."""
