"""Rows on their way to a step: planned, built ahead, and numbers that are kept of them."""
