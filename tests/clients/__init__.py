"""Programs of four clients, as their users write them, and the environment in which they run."""
