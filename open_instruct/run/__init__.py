"""What every run has: its folder, its lock, its console, its metrics."""
