"""Documents into microbatches."""
