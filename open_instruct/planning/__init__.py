"""Memory, traffic and time of a run, predicted from its flags alone and without torch."""
