"""From a learner's shards to the engines: one interface, several ways."""
