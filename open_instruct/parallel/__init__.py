"""Which rank holds what, and how ranks talk."""
