"""A plan for people and for scripts: on the terminal, as a page, as JSON."""
