"""Rows as the model will see them, before anything is trained."""
