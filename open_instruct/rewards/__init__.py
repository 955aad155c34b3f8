"""Verifiers of answers: one class for each kind of answer, registered by name."""
