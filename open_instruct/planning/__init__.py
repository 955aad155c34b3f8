"""What a run will need, before it is started: memory, traffic and time from its flags alone, without torch."""
