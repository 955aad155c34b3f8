"""A plan for people and for scripts: its parts and rows, as JSON, and in the words of a run that starts."""
