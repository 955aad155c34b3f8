"""Rows on their way to a step: loaders, batches built ahead, and caches of numbers for rows."""
