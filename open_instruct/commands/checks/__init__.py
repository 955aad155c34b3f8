"""The parts of `open-instruct check`: what it looks at, and what it reports."""
