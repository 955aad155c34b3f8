"""What is planned: a model, what is done with it in a step, and the GPUs."""
