"""The parts of every run: its folder, its lock, its console and its metrics."""
