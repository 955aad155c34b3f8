"""Measurements of a step: metrics, memory, seconds, profiles."""
