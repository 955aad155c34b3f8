"""Parts of the estimate of a step's time, `benchmarks/step_estimate.py`."""
