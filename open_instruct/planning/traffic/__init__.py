"""The communication of ranks in a step, and a lower bound of the step's time."""
