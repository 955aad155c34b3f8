"""Optimizers and schedules, from flags to those of OLMo-core."""
