"""Rows on their way to a step: loaders, and batches built ahead."""
