"""The learner on DeepSpeed: ZeRO 0 to 3 over all ranks. The one place that knows DeepSpeed."""
