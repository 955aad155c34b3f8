"""Nodes, places and processes of a run, and how they end."""
