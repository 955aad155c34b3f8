"""Commands that take what a run has left: each file is one, or knows one thing for several."""
