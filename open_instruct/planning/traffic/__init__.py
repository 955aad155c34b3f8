"""What ranks exchange in a step, and the least time that it takes."""
