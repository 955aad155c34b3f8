"""Rows whose replies were sampled, with their exact ids."""
