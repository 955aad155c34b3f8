"""Rows, chat templates and the tokenised dataset."""
