"""What `grpo_vs_trl.py` runs."""
