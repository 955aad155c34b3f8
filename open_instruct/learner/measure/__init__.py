"""What a step says of itself: metrics, memory, seconds, profiles."""
