"""Causal attention over packed documents: with shared prompts, with rows split over ranks, and on
CPUs.
"""
