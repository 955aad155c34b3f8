"""Chat templates: the built-in ones, their choice and checks, and a trial of those of others."""
