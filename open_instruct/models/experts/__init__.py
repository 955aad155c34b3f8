"""Sparse MLPs: a router, and experts of which it chooses a few for each token."""
