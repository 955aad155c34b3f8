"""Nodes, places and processes: what Ray is asked for, and what ends with the run."""
