"""Checkpoints: written whole, checked, and resumed from."""
